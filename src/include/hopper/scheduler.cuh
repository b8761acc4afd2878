// Which block works on which item, and in what order.
//
// An item is one query block of one (batch, head) pair. Items are numbered so that
//   - pairs are taken in sections of `section_heads`: a section's K and V stay in the L2 cache while all its
//     query blocks pass over them;
//   - inside a section the query blocks go from last to first, so that under a causal mask the longest items
//     start first and the short ones fill the end;
//   - of one query block, the heads of the section come one after another.
//
// Blocks are persistent. Item number i goes to block i % blocks (static), or each block takes the next
// number from a counter when it begins an item (dynamic): causal items differ in length, and static rounds
// would leave blocks idle.
#pragma once

#include "hopper/forward_kernel_args.cuh"
#include "hopper/pipeline.cuh"

namespace flash::hopper {

template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
struct Scheduler {
    using Static = StaticForwardKernelConfig<CFG, TRAITS>;

    const ForwardKernelArgs &args;
    int current = 0;
    int following = 0;  // dynamic: the number taken in advance, so that its latency is hidden

    FLASH_DEVICE explicit Scheduler(const ForwardKernelArgs &kernel_args) : args(kernel_args) {
        current = blockIdx.x;
        if (CFG.dynamic_schedule) following = take();
    }

    FLASH_DEVICE bool has_item() const { return current < args.n_items; }

    FLASH_DEVICE WorkItem item() const {
        const int items_per_section = args.section_heads * args.n_q_blocks;
        const int section = current / items_per_section;
        const int in_section = current - section * items_per_section;
        const int first_pair = section * args.section_heads;
        const int heads = min(args.section_heads, args.n_head_pairs - first_pair);
        const int step = in_section / heads;
        const int pair = first_pair + (in_section - step * heads);

        WorkItem item;
        item.q_block = args.first_q_block + args.n_q_blocks - 1 - step;
        item.batch = pair / args.n_heads;
        item.head = pair - item.batch * args.n_heads;
        item.n_kv_blocks = (args.seq_len_k + Static::B_c - 1) / Static::B_c;
        if constexpr (TRAITS.causal) {
            const int visible = (item.q_block + 1) * Static::B_r + args.seq_len_k - args.seq_len_q;
            item.n_kv_blocks = min(item.n_kv_blocks, (visible + Static::B_c - 1) / Static::B_c);
        }
        return item;
    }

    // To be called when the current item has been decoded ...
    FLASH_DEVICE void advance() { current = CFG.dynamic_schedule ? following : current + gridDim.x; }

    // ... and this when all its loads have been issued.
    FLASH_DEVICE void prefetch() {
        if (CFG.dynamic_schedule && has_item()) following = take();
    }

    // The last block to come to its end leaves the counter as the launch found it.
    FLASH_DEVICE void finish() {
        if (!CFG.dynamic_schedule || args.counter == nullptr) return;
        __threadfence();
        if (atomicAdd(&args.counter->finished_blocks, 1) == static_cast<int>(gridDim.x) - 1) {
            args.counter->next = 0;
            args.counter->finished_blocks = 0;
            __threadfence();
        }
    }

  private:
    FLASH_DEVICE int take() {
        if (args.counter == nullptr) return current + gridDim.x;
        return atomicAdd(&args.counter->next, 1) + gridDim.x;
    }
};

}  // namespace flash::hopper
