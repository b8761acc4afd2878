// Values that depend on the distance between key and query alone, for the scores of a warpgroup: 64 keys and
// kQueries queries have 63 + kQueries of them. Each is computed by one thread, and all read them from shared
// memory.
#pragma once

#include "common/cuda_utils.cuh"
#if defined(FLASH_DEVICE)  // host tests read the rest
#include "common/ptx.cuh"
#endif

namespace flash {

template <int kQueries>
struct SharedDiagonals {
    static constexpr int kKeys = 64, kThreads = 128;
    static constexpr int kLowest = 1 - kQueries;  // key - query, both counted within the tile
    static constexpr int kValues = round_up(kKeys + kQueries - 1, kWarpSize);
    static constexpr int kBytes = kValues * int(sizeof(float));

    // Where the value of a distance lies.
    static FLASH_HOST_DEVICE constexpr uint32_t place(int distance) {
        return (distance - kLowest) * int(sizeof(float));
    }

#if defined(FLASH_DEVICE)
    // `value(distance)`; all threads, between two barriers.
    template <typename Value>
    static FLASH_DEVICE void find(uint32_t smem, int thread, const Value &value) {
#pragma unroll
        for (int i = 0; i < kValues; i += kThreads) {
            if (i + kThreads <= kValues || i + thread < kValues) {
                const int distance = kLowest + i + thread;
                store_shared(smem + place(distance), __float_as_uint(value(distance)));
            }
        }
    }
#endif
};

}  // namespace flash
