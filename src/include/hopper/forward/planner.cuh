// The warp that finds planned items, one ahead of the load thread: it hands over those with tiles, through
// shared memory, and writes the rows of the others itself.
#pragma once

#include "common/planned_scheduler.cuh"
#include "hopper/forward/item_slot.cuh"

namespace flash::hopper {

template <typename Kernel>
FLASH_DEVICE void run_planner(const SharedMemory<Kernel> &smem, const ForwardKernelArgs &args) {
    const int lane = threadIdx.x % kWarpSize;
    RingPosition<SharedMemory<Kernel>::kFoundSlots> position{1};
    const auto hand_over = [&](const PlannedItem &item) {
        if (lane == 0) {
            const uint32_t slot = position.slot();
            write_planned_item(smem.found(slot), item);
            mbarrier_arrive(smem.found_full(slot));
        }
        __syncwarp();
        position.advance();
    };
    PlannedScheduler<Kernel, ForwardKernelArgs> scheduler;
    scheduler.start(args);
    PlannedItem item{};
    while (scheduler.next(args, item)) {
        if (item.has_tiles()) {
            hand_over(item);
            mbarrier_wait(smem.found_empty(position.slot()), position.phase());  // the next is wanted
        } else {
            fill_planned_item<(Kernel::chunk_tiles > 0)>(args.planned, args.output, item, lane, kWarpSize);
        }
    }
    PlannedItem end{};
    end.end_kv_block = kNoItem;
    hand_over(end);
    if (lane == 0) PlannedScheduler<Kernel, ForwardKernelArgs>::finish(args);
}

}  // namespace flash::hopper
