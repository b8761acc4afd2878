// Which planned items a thread block takes, and in which order.
//
// There are two classes: prompts, sequences of several blocks of queries, whose items compute, and the
// others, decoding, whose items read. Half of the thread blocks begin with each, so that the tensor cores and
// the memory have work at the same time, and go on with the other class when theirs is at its end. Items of a
// class are numbered for themselves. The first numbers belong to the thread blocks that begin with the class,
// each its own, so that no first load waits for a counter; then each takes the next from the class's counter.
#pragma once

#include "common/planned_work.cuh"
#include "common/scheduler_counter.cuh"

namespace flash {

// Of a whole warp. Args: the kernel's arguments, as for PlannedItems, with `counter`; where there is none,
// numbers go round.
template <typename Kernel, typename Args, bool kSeenBefore = false, bool kKeepsSequences = true>
struct PlannedScheduler {
    PlannedItems<Kernel, Args, kSeenBefore, kKeepsSequences> items;
    int classes_left;
    int number;  // that is looked for next; negative: it has not been taken

    FLASH_DEVICE void start(const Args &args) {
        const bool both = args.planned.has_prompts;
        classes_left = both ? 2 : 1;
        items.start(both && blockIdx.x % 2 == 0);
        number = static_cast<int>(both && args.counter != nullptr ? blockIdx.x / 2 : blockIdx.x);
    }

    // The next item with tiles or without. False: there is none.
    FLASH_DEVICE bool next(const Args &args, PlannedItem &item) {
        if (number < 0) number = take(args);
        while (!items.has(args, number)) {
            if (--classes_left == 0) return false;
            begin_class(args, !items.prompts);
        }
        item = items.item(args, number);
        number = args.counter != nullptr ? -1 : number + static_cast<int>(gridDim.x);
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
        return __shfl_sync(kAllLanes, taken, 0) + first_of_counter(args);
    }

    // The numbers before it are those of the blocks that begin with the class.
    FLASH_DEVICE int first_of_counter(const Args &args) const {
        const int blocks = static_cast<int>(gridDim.x);
        return !args.planned.has_prompts ? blocks : (blocks + items.prompts) / 2;
    }
};

}  // namespace flash
