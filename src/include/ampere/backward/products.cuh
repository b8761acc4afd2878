// Products of a warp: C (16 kM rows x 8 kN columns) += A B, with mma.sync, along steps of 16.
//
// Fragments of B come one ldmatrix at a time, kAhead of them ahead of their products; those of A a step at a
// time, or they are held in registers.
#pragma once

#include "ampere/load_store.cuh"
#include "common/fragments.cuh"
#include "common/ptx.cuh"

namespace flash::ampere {

template <int kM, int kN>
struct Sums {
    float rmem[kM][kN][4];

    FLASH_DEVICE void clear() {
#pragma unroll
        for (auto &row : rmem) {
#pragma unroll
            for (auto &tile : row) {
#pragma unroll
                for (float &value : tile) value = 0.0f;
            }
        }
    }
};

// One step of A.
template <int kM>
struct RowFragment {
    uint32_t rmem[kM][4];
};

// A that is loaded as the product goes on: load(fragment, step).
template <int kM, typename Load>
struct StreamedOperand {
    RowFragment<kM> buffer[2];
    Load load_step;

    FLASH_DEVICE StreamedOperand(Load load) : load_step(load) {}
    FLASH_DEVICE void load(int step) { load_step(buffer[step % 2], step); }
    FLASH_DEVICE const RowFragment<kM> &operator[](int step) const { return buffer[step % 2]; }
};
template <int kM, typename Load>
FLASH_DEVICE StreamedOperand<kM, Load> streamed(Load load) {
    return {load};
}

// A that is in registers.
template <int kM, int kSteps>
struct HeldOperand {
    RowFragment<kM> steps[kSteps];

    FLASH_DEVICE void load(int) {}
    FLASH_DEVICE const RowFragment<kM> &operator[](int step) const { return steps[step]; }
};

// `load_B(fragment, step, n)`: columns 16 n ... 16 n + 15 of step `step`.
template <DType kDType, int kSteps, int kM, int kN, typename A, typename LoadB>
FLASH_DEVICE void multiply(Sums<kM, kN> &C, A &operand, LoadB load_B) {
    constexpr int per_step = kN / 2;
    constexpr int ahead = per_step < 2 ? 1 : 2;
    stream_fragments<ahead, kSteps * per_step>(
        [&](uint32_t (&B)[4], int i) {
            if (i % per_step == 0) operand.load(i / per_step);
            load_B(B, i / per_step, i % per_step);
        },
        [&](const uint32_t (&B)[4], int i) {
            const int n = i % per_step;
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                const uint32_t (&A_rmem)[4] = operand[i / per_step].rmem[m];
                mma<kDType>(C.rmem[m][2 * n], A_rmem, B[0], B[1]);
                mma<kDType>(C.rmem[m][2 * n + 1], A_rmem, B[2], B[3]);
            }
        });
}

// How a lane addresses the fragments of a tile in shared memory (fragments.cuh).
struct LaneRows {
    LdmatrixRow down;   // squares go down first: A as it lies, B transposed
    LdmatrixRow right;  // squares go to the right first: B as it lies, A transposed

    FLASH_DEVICE explicit LaneRows(int lane) : down(ldmatrix_row_QV(lane)), right(ldmatrix_row_K(lane)) {}
};

}  // namespace flash::ampere
