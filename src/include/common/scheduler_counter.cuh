// What the blocks of a launch share to take their items (scheduler.cuh, scheduler_counters.cuh).
#pragma once

namespace flash {

// Items handed out, and blocks that have seen the end. All are zero before and after a launch.
struct SchedulerCounter {
    int next;
    int finished_blocks;
    int next_of_class;  // planned work has two classes of items
};

}  // namespace flash
