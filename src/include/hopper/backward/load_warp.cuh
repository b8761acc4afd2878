// The warp that takes items and loads their tiles, what it is in both kernels: all lanes go from item to
// item, one issues the copies, and behind the last item comes the end.
#pragma once

#include "hopper/backward/items.cuh"
#include "hopper/ptx_sm90.cuh"
#include "tma/scheduler.cuh"

namespace flash::hopper {

// The slot of shared memory that carries the next item: its barriers, and what phase the empty one has when
// the slot is free.
struct ItemSlot {
    uint32_t item, full, empty, phase;
};

// `hand_out`: called with each item, by all lanes, and whether the lane issues the copies. `next_slot`: where
// the end goes, after the last one.
template <typename Items, typename Memory, typename HandOut, typename NextSlot>
FLASH_DEVICE void hand_out_items(const BackwardKernelArgs &args, const Memory &smem, const HandOut &hand_out,
                                 const NextSlot &next_slot) {
    const bool issues = threadIdx.x % kWarpSize == 0;
    Items scheduler(args, smem);
    while (scheduler.has_item()) {
        const BackwardItem item = scheduler.item();
        scheduler.advance();
        hand_out(item, issues);
        __syncwarp();
        scheduler.prefetch();
    }
    if (!issues) return;
    const ItemSlot slot = next_slot();
    mbarrier_wait(slot.empty, slot.phase);
    BackwardItem end{};
    end.n_steps = kEndOfItems;
    write_item(slot.item, end);
    mbarrier_arrive(slot.full);
    scheduler.finish();
}

}  // namespace flash::hopper
