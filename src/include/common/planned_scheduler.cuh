// Which planned items a thread block takes, and in which order.
//
// There are two classes: prompts, sequences of several blocks of queries, whose items compute, and the
// others, decoding, whose items read. Half of the thread blocks begin with each, so that the tensor cores and
// the memory have work at the same time, and go on with the other class when theirs is at its end. Items of a
// class are numbered for themselves; each thread block takes the next number from the class's counter.
#pragma once

#include "common/planned_work.cuh"
#include "common/scheduler_counter.cuh"

namespace flash {

// Of a whole warp. Args: the kernel's arguments, as for PlannedItems, with `counter`; where there is none,
// numbers go round.
template <typename Kernel, typename Args, bool kSeenBefore = false>
struct PlannedScheduler {
    PlannedItems<Kernel, Args, kSeenBefore> items;
    int classes_left;
    int number;  // that is looked for next

    FLASH_DEVICE void start(const Args &args) {
        const bool both = args.planned.has_prompts;
        classes_left = both ? 2 : 1;
        begin_class(args, both && blockIdx.x % 2 == 0);
    }

    // The next item with tiles or without. False: there is none.
    FLASH_DEVICE bool next(const Args &args, PlannedItem &item) {
        while (!items.has(args, number)) {
            if (--classes_left == 0) return false;
            begin_class(args, !items.prompts);
        }
        item = items.item(args, number);
        number = args.counter != nullptr ? take(args) : number + static_cast<int>(gridDim.x);
        return true;
    }

    // The last block to come to its end leaves the counters as the launch found them. Called by one thread.
    FLASH_DEVICE static void finish(const Args &args) {
        if (args.counter == nullptr) return;
        __threadfence();  // this block's numbers are taken before it counts as finished
        if (atomicAdd(&args.counter->finished_blocks, 1) == static_cast<int>(gridDim.x) - 1) {
            args.counter->next = 0;
            args.counter->next_of_class = 0;
            args.counter->finished_blocks = 0;
        }
    }

  private:
    FLASH_DEVICE void begin_class(const Args &args, bool prompts) {
        items.start(prompts);
        number = args.counter != nullptr ? take(args) : static_cast<int>(blockIdx.x);
    }

    FLASH_DEVICE int take(const Args &args) const {
        int taken = 0;
        if (threadIdx.x % kWarpSize == 0) {
            taken = atomicAdd(items.prompts ? &args.counter->next_of_class : &args.counter->next, 1);
        }
        return __shfl_sync(kAllLanes, taken, 0);
    }
};

}  // namespace flash
