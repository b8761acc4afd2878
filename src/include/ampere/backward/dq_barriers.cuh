// Who waits for whom in the kernel of dQ alone:
//
//     full Q                 Q, dO and the numbers of their rows are copied, once
//     full K, V [stage]      copied
//     empty K, V [stage]     read by all warps for the last time
#pragma once

#include "ampere/backward/barriers.cuh"
#include "common/ptx.cuh"

namespace flash::ampere {

template <int kStages>
struct KeyRingBarriers {
    uint32_t smem;

    FLASH_DEVICE uint32_t at(int i) const { return smem + 8 * i; }
    FLASH_DEVICE uint32_t full_Q() const { return at(0); }  // and dO
    FLASH_DEVICE uint32_t full_K(int stage) const { return at(1 + stage); }
    FLASH_DEVICE uint32_t full_V(int stage) const { return at(1 + kStages + stage); }
    FLASH_DEVICE uint32_t empty_K(int stage) const { return at(1 + 2 * kStages + stage); }
    FLASH_DEVICE uint32_t empty_V(int stage) const { return at(1 + 3 * kStages + stage); }

    FLASH_DEVICE void initialize(int n_threads) const {
        const int warps = n_threads / kWarpSize * kArrivalsOfWarp;
        mbarrier_init(full_Q(), n_threads);
        for (int i = 0; i < kStages; ++i) {
            mbarrier_init(full_K(i), n_threads);
            mbarrier_init(full_V(i), n_threads);
            mbarrier_init(empty_K(i), warps);
            mbarrier_init(empty_V(i), warps);
        }
    }
    static FLASH_DEVICE void arrive(uint32_t barrier, int lane) {
        __syncwarp();
        if (arrives_for_warp(lane)) mbarrier_arrive(barrier);
    }
};

}  // namespace flash::ampere
