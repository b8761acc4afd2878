// Which block takes which work item.
//
// Blocks are persistent. Item i goes to block i % blocks (static), or each block takes the next number from a
// counter when it begins an item (dynamic): causal items differ in length, and static rounds would leave
// blocks idle at the end. Paired blocks take an item of two query blocks together, one each, in static
// rounds; causal ones, whose items get shorter, go through every second round backwards, so that no pair
// has the longer item each time.
#pragma once

#include "hopper/forward_kernel_args.cuh"
#include "hopper/sequence_finder.cuh"

namespace flash::hopper {

// One thread's, or, where the static configuration says kWarpLoads, a whole warp's.
template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
struct Scheduler {
    using Static = StaticForwardKernelConfig<CFG, TRAITS>;

    static constexpr int kBlocksAnItem = Static::kPaired ? 2 : 1;

    const ForwardKernelArgs &args;
    SequenceFinder<CFG, TRAITS> sequences;  // varlen
    int current = 0;
    int following = 0;  // dynamic: the number taken in advance, so that its latency is hidden
    int step = 0;       // paired and causal: to the next number

    FLASH_DEVICE explicit Scheduler(const ForwardKernelArgs &kernel_args) : args(kernel_args) {
        current = blockIdx.x / kBlocksAnItem;
        if (Static::kPassesTiles) step = 2 * (n_takers() - current) - 1;
        if (CFG.dynamic_schedule) following = take();
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
        if constexpr (Static::kPassesTiles) {
            current += step;
            step = 2 * n_takers() - step;
        } else {
            current = CFG.dynamic_schedule ? following : current + n_takers();
        }
    }

    // ... and this when all its loads have been issued.
    FLASH_DEVICE void prefetch() {
        // To look for the end takes long where sequences differ; a number too many does no harm.
        if (CFG.dynamic_schedule && (TRAITS.varlen || has_item())) following = take();
    }

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
        if (args.counter == nullptr) return current + gridDim.x;
        if constexpr (!Static::kWarpLoads) return atomicAdd(&args.counter->next, 1) + gridDim.x;
        int taken = 0;
        if (threadIdx.x % 32 == 0) taken = atomicAdd(&args.counter->next, 1);
        return __shfl_sync(kAllLanes, taken, 0) + gridDim.x;
    }
};

}  // namespace flash::hopper
