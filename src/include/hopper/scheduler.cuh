// Which block takes which work item.
//
// Blocks are persistent. Item i goes to block i % blocks (static), or each block takes the next number from a
// counter when it begins an item (dynamic): causal items differ in length, and static rounds would leave
// blocks idle at the end. Paired blocks take an item of two query blocks together, one each: the first takes
// numbers from the counter, and sends them to the second.
#pragma once

#include "hopper/forward/kernel_args.cuh"
#include "hopper/forward/pipeline.cuh"
#include "hopper/sequence_finder.cuh"

namespace flash::hopper {

// One thread's, or, where the static configuration says kWarpLoads, a whole warp's.
template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
struct Scheduler {
    using Static = StaticForwardKernelConfig<CFG, TRAITS>;

    static constexpr int kBlocksAnItem = Static::kPaired ? 2 : 1;
    static constexpr bool kSendsNumbers = Static::kMailSlots > 0;
    static constexpr uint32_t kMailSlots = max_of(Static::kMailSlots, 1);

    const ForwardKernelArgs &args;
    const SharedMemory<CFG, TRAITS> smem;
    SequenceFinder<CFG, TRAITS> sequences;  // varlen
    int current = 0;
    int following = 0;     // dynamic: the number taken in advance, so that its latency is hidden
    uint32_t n_mails = 0;  // sent or received

    FLASH_DEVICE Scheduler(const ForwardKernelArgs &kernel_args, const SharedMemory<CFG, TRAITS> &shared)
        : args(kernel_args), smem(shared) {
        current = blockIdx.x / kBlocksAnItem;
        if (CFG.dynamic_schedule && !receives()) following = take();
    }

    FLASH_DEVICE bool has_item() {
        if constexpr (TRAITS.varlen) return sequences.advance_to(args, current);
        return current < args.work.n_items;
    }

    FLASH_DEVICE WorkItem item() const {
        if constexpr (TRAITS.varlen) return sequences.item(args, current);
        WorkItem item = work_item<Static::kItemRows, CFG.B_c>(
            args.work, make_mask<TRAITS>(args, args.work.seq_len_q, args.work.seq_len_k), args.n_parts,
            current);
        if (Static::kPaired) item.q_block = 2 * item.q_block + blockIdx.x % 2;
        return item;
    }

    // To be called when the current item has been decoded ...
    FLASH_DEVICE void advance() {
        if (receives()) return;  // not before `prefetch`
        current = CFG.dynamic_schedule ? following : current + n_takers();
    }

    // ... this between its loads, when `current` has arrived ...
    FLASH_DEVICE void deliver() {
        if (!kSendsNumbers || receives() || args.counter == nullptr) return;
        const uint32_t slot = n_mails++ % kMailSlots;
        store_async_at(smem.mail(slot), current, smem.mail_full(slot), 1);
    }

    // ... and this when all its loads have been issued.
    FLASH_DEVICE void prefetch() {
        if (receives()) {
            current = receive();
            return;
        }
        // To look for the end takes long where sequences differ; a number too many does no harm.
        if (CFG.dynamic_schedule && (TRAITS.varlen || has_item())) following = take();
    }

    // Of paired blocks the second.
    FLASH_DEVICE bool receives() const { return kSendsNumbers && blockIdx.x % 2 == 1; }

    // The last block to come to its end leaves the counter as the launch found it. Called by one thread.
    FLASH_DEVICE void finish() {
        if (!CFG.dynamic_schedule || args.counter == nullptr) return;
        __threadfence();  // this block's numbers are taken before it counts as finished
        if (atomicAdd(&args.counter->finished_blocks, 1) == static_cast<int>(gridDim.x) - 1) {
            args.counter->next = 0;
            args.counter->finished_blocks = 0;
        }
    }

  private:
    FLASH_DEVICE static int n_takers() { return gridDim.x / kBlocksAnItem; }

    FLASH_DEVICE int take() {
        if (args.counter == nullptr) return current + n_takers();
        if constexpr (!Static::kWarpLoads) return atomicAdd(&args.counter->next, 1) + n_takers();
        int taken = 0;
        if (threadIdx.x % 32 == 0) taken = atomicAdd(&args.counter->next, 1);
        return __shfl_sync(kAllLanes, taken, 0) + gridDim.x;
    }

    FLASH_DEVICE int receive() {
        if (args.counter == nullptr) return current + n_takers();
        const uint32_t slot = n_mails % kMailSlots, phase = n_mails / kMailSlots & 1;
        ++n_mails;
        mbarrier_arrive_expect(smem.mail_full(slot), 4);
        mbarrier_wait(smem.mail_full(slot), phase);
        return load_shared_int(smem.mail(slot));
    }
};

}  // namespace flash::hopper
