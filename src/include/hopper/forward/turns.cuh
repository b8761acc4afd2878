// How a consumer's warp and warpgroup meet others. Warpgroups
// take turns to issue products, and warps release what they have read.
#pragma once

#include "hopper/forward/static_kernel_configuration.cuh"
#include "hopper/ptx_sm90.cuh"

namespace flash::hopper {

// Consumer: what derives from it and has `warpgroup` and `lane`.
template <typename Kernel, typename Consumer>
struct Turns {
    // Turns: named barrier 1 + i is warpgroup i's, joined by its 128 threads and the 128 that pass to it.
    FLASH_DEVICE void await_turn() {
        if (Kernel::cfg.ping_pong) named_barrier_sync(1 + self().warpgroup, 2 * kWarpgroupThreads);
    }
    FLASH_DEVICE void pass_turn_to(int other) { named_barrier_arrive(1 + other, 2 * kWarpgroupThreads); }
    FLASH_DEVICE void pass_turn() {
        if (Kernel::cfg.ping_pong) pass_turn_to((self().warpgroup + 1) % Kernel::n_consumers);
    }

    FLASH_DEVICE void sync_warpgroup() { named_barrier_sync(8 + self().warpgroup, kWarpgroupThreads); }

    // This warp no longer needs what the barrier guards.
    FLASH_DEVICE void release(uint32_t barrier) {
        if (arrives_for_warp(self().lane)) mbarrier_arrive(barrier);
    }
    // The same of a K or V slot. Of paired blocks both must know: each loads a half of the other's next tile.
    FLASH_DEVICE void release_tile(uint32_t barrier) {
        if constexpr (Kernel::paired_blocks && kEveryLaneArrives) {
            mbarrier_arrive_at(barrier, 0);
            mbarrier_arrive_at(barrier, 1);
        } else if constexpr (Kernel::paired_blocks) {
            if (self().lane < 2) mbarrier_arrive_at(barrier, self().lane);
        } else {
            release(barrier);
        }
    }

  private:
    FLASH_DEVICE const Consumer &self() const { return static_cast<const Consumer &>(*this); }
};

}  // namespace flash::hopper
