// Which block takes which work item.
//
// Blocks are persistent. Item i goes to block i % blocks (static), or each block takes the next number from a
// counter when it begins an item (dynamic): causal items differ in length, and static rounds would leave
// blocks idle at the end. Paired blocks take an item of two query blocks together, one each: the first takes
// numbers from the counter, and sends them to the second.
#pragma once

#include "common/scheduler_counter.cuh"
#include "tma/ptx_tma.cuh"
#include "tma/sequence_finder.cuh"
#include "tma/work_items.cuh"

namespace flash::tma {

// The items of query blocks (work_items.cuh): which numbers there are, and what they mean.
template <typename Kernel, typename Args>
struct QueryItems {
    SequenceFinder<Kernel, Args> sequences;  // varlen

    FLASH_DEVICE bool has(const Args &args, int number) {
        if constexpr (Kernel::traits.varlen) return sequences.advance_to(args, number);
        return number < args.work.n_items;
    }

    FLASH_DEVICE WorkItem item(const Args &args, int number) const {
        if constexpr (Kernel::traits.varlen) return sequences.item(args, number);
        WorkItem item = work_item<Kernel::item_rows, Kernel::B_c, chunk_tiles_of<Kernel>()>(
            args.work, args.template mask<Kernel::traits>(args.work.seq_len_q, args.work.seq_len_k),
            args.n_splits, number);
        if (Kernel::paired_blocks) item.q_block = 2 * item.q_block + blockIdx.x % 2;
        return item;
    }
};

// One thread's, or, with Kernel::warp_loads, a whole warp's.
//
// Kernel     traits, B_r, B_c, cfg.dynamic_schedule; item_rows: of an item; warp_loads: items may have no
// tiles;
//            paired_blocks: two blocks take an item; mail_slots: how many numbers one sends to the other
// Args       the kernel's arguments: work (WorkShape), counter, n_splits, mask<traits>(), and with varlen
// what
//            SequenceFinder reads
// Memory     addresses in shared memory: mail(slot) of a number, mail_full(slot) of its mbarrier
// Items      which item a number is
template <typename Kernel, typename Args, typename Memory, typename Items = QueryItems<Kernel, Args>>
struct Scheduler {
    static constexpr int kBlocksAnItem = Kernel::paired_blocks ? 2 : 1;
    static constexpr bool kSendsNumbers = Kernel::mail_slots > 0;
    static constexpr uint32_t kMailSlots = max_of(Kernel::mail_slots, 1);

    const Args &args;
    const Memory smem;
    Items items;
    int current = 0;
    int following = 0;     // dynamic: the number taken in advance, so that its latency is hidden
    uint32_t n_mails = 0;  // sent or received

    FLASH_DEVICE Scheduler(const Args &kernel_args, const Memory &shared) : args(kernel_args), smem(shared) {
        current = blockIdx.x / kBlocksAnItem;
        if (Kernel::cfg.dynamic_schedule && !receives()) following = take();
    }

    FLASH_DEVICE bool has_item() { return items.has(args, current); }

    FLASH_DEVICE auto item() const { return items.item(args, current); }

    // To be called when the current item has been decoded ...
    FLASH_DEVICE void advance() {
        if (receives()) return;  // not before `prefetch`
        current = Kernel::cfg.dynamic_schedule ? following : current + n_takers();
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
        if (Kernel::cfg.dynamic_schedule && (Kernel::traits.varlen || has_item())) following = take();
    }

    // Of paired blocks the second.
    FLASH_DEVICE bool receives() const { return kSendsNumbers && blockIdx.x % 2 == 1; }

    // The last block to come to its end leaves the counter as the launch found it. Called by one thread.
    FLASH_DEVICE void finish() {
        if (!Kernel::cfg.dynamic_schedule || args.counter == nullptr) return;
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
        if constexpr (!Kernel::warp_loads) return atomicAdd(&args.counter->next, 1) + n_takers();
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

}  // namespace flash::tma
