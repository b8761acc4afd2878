// Values of a warp's 16 x n scores that depend on column - row alone. A thread needs n / 4 + 2 of them: its
// rows are 8 apart, as squares are, so that square n of the second row has what square n - 1 of the first
// has.
//
//     row 0, square n: 8 n + t      row 8, square n: 8 (n - 1) + t      t = 2 (lane % 4) + c - lane / 4
//
// Costly ones are computed once a warp, each by one lane, and handed over.
#pragma once

#include "common/cuda_utils.cuh"
#include "common/fragments.cuh"
#include "common/ptx.cuh"

namespace flash {

template <int kSquares, bool kShared>
struct Diagonals {
    static constexpr int kRegisters = 2 * (kSquares + 1);
    static constexpr int kLowest = -15;                              // column - row
    static constexpr int kRounds = ceil_div(8 * kSquares + 15, 32);  // in which a warp has computed all
    static_assert(kSquares % 2 == 0);

    float values[kSquares + 1][2];

    // `value(distance)`: of column - row.
    template <typename Value>
    FLASH_DEVICE void find(int lane, const Value &value) {
        const int lane_distance = 2 * (lane & 3) - (lane >> 2);
        if constexpr (!kShared) {
#pragma unroll
            for (int i = 0; i <= kSquares; ++i) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    values[i][c] = computed_here(value(8 * (i - 1) + lane_distance + c));
                }
            }
        } else {
            float own[kRounds];  // 32 j + lane, counted from the lowest
#pragma unroll
            for (int j = 0; j < kRounds; ++j) own[j] = value(kLowest + 32 * j + lane);
#pragma unroll
            for (int i = 0; i <= kSquares; ++i) {
                // The warp's lanes need 15 neighbouring ones. Where they lie in two rounds, the first lanes
                // hand on those of the second.
                const int round = 8 * i / 32;
                float handed = own[round];
                if (8 * i % 32 == 24) handed = lane < 24 ? own[round + 1] : handed;
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int from = place(i, lane) + c;  // of which the lowest 5 bits count
                    values[i][c] = computed_here(__shfl_sync(kAllLanes, handed, from));
                }
            }
        }
    }

    // Of the thread's row r, square n, column c.
    FLASH_DEVICE float value(int r, int n, int c) const { return values[n - r + 1][c]; }

    // Which one, counted from the lowest, values[i][0] of a lane is.
    static FLASH_HOST_DEVICE constexpr int place(int i, int lane) {
        return 8 * (i - 1) + 2 * (lane & 3) - (lane >> 2) - kLowest;
    }
};

// Of a mod that has none.
struct NoDiagonals {
    static constexpr int kRegisters = 0;
};

}  // namespace flash
