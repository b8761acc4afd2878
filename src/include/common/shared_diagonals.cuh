// Values that depend on the distance between key and query alone, for a tile of scores: kKeys keys and
// kQueries queries have kKeys + kQueries - 1 of them. Each is computed by one thread, and all read them from
// shared memory.
#pragma once

#include "common/cuda_utils.cuh"
#if defined(FLASH_DEVICE)  // host tests read the rest
#include "common/ptx.cuh"
#endif

namespace flash {

template <int kKeys, int kQueries>
struct SharedDiagonals {
    static constexpr int kThreads = 128;
    static constexpr int kLowest = 1 - kQueries;  // key - query, both counted within the tile
    static constexpr int kCount = kKeys + kQueries - 1;
    static constexpr int kValues = round_up(kCount, kWarpSize);
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

    // The values of a thread's scores, rows of which are queries, in the order of an accumulator
    // (fragments.cuh). `row`, `column`: of its first score, in the tile. Square n of its second row has what
    // square n - 1 of the first has.
    static FLASH_DEVICE void read(float (&values)[kKeys / 2], uint32_t smem, int row, int column) {
        const uint32_t own = smem + place(column - row);
#pragma unroll
        for (int n = 0; n <= kKeys / 8; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float value =
                    __uint_as_float(load_shared_word(own + (8 * (n - 1) + c) * sizeof(float)));
                if (n > 0) values[4 * (n - 1) + c] = value;
                if (n < kKeys / 8) values[4 * n + 2 + c] = value;
            }
        }
    }
#endif
};

}  // namespace flash
