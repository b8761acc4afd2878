// What chunks of keys have left of a thread block's rows, where it takes several of them
// (common/chunks.cuh). Each thread has its own elements of its accumulators in global memory, which nobody
// else reads, and which the L2 cache answers for.
#pragma once

#include "ampere/forward/kernel_args.cuh"
#include "ampere/forward/softmax.cuh"
#include "ampere/gemm.cuh"
#include "common/chunks.cuh"
#include "common/quad.cuh"

namespace flash::ampere {

template <typename Kernel>
struct KeptRows {
    static_assert(kRowsPerThread == 2 && !Kernel::paired_warps && !Kernel::cfg.tensor_row_sums);
    static constexpr int kTiles = Kernel::d_head / kMmaN;  // of a thread's O, four floats each
    static constexpr int kSlots = Kernel::m_tiles * (1 + kTiles);
    static_assert(kSlots * Kernel::n_threads * int(sizeof(float4)) == Kernel::kept_bytes);

    float4 *own;  // slot i is own[i * n_threads]
    int size;     // see divide_schedule

    // Addresses are found here, and take no registers in the loops of blocks of keys.
    FLASH_DEVICE explicit KeptRows(const ForwardKernelArgs &args)
        : own(reinterpret_cast<float4 *>(args.kept_sums) +
              static_cast<int64_t>(computed_here(blockIdx.x)) * (kSlots * Kernel::n_threads) +
              computed_here(threadIdx.x)),
          size(args.seq_len_q) {}

    // Rows begin anew, and what they have is kept.
    FLASH_DEVICE void keep(Output<Kernel> &O, OnlineSoftmax<Kernel> &softmax) const {
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
            const float (&reference)[2] = softmax.reference[m];
            rows_of(m) = make_float4(softmax.total(m, 0), softmax.total(m, 1), -reference[0], -reference[1]);
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                const float (&o)[4] = O.rmem[m][n];
                tile_of(m, n) = make_float4(o[0], o[1], o[2], o[3]);
            }
        }
        softmax = OnlineSoftmax<Kernel>(softmax.scale);
        O.clear();
    }

    // Takes what is kept, of the chunks before, into O and the softmax. The sums are then with the first lane
    // of each quad, and those of the others 0.
    FLASH_DEVICE void join(Output<Kernel> &O, OnlineSoftmax<Kernel> &softmax) const {
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
            const float4 rows = rows_of(m);
            const float sum[2] = {rows.x, rows.y}, exponent[2] = {rows.z, rows.w};
            const ChunkWeights weights[2] = {{exponent[0], -softmax.reference[m][0]},
                                             {exponent[1], -softmax.reference[m][1]}};
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float joined = weights[r].join(sum[r], softmax.total(m, r));
                softmax.row_sum[m][r] = (threadIdx.x & 3) == 0 ? joined : 0.0f;
                softmax.reference[m][r] = -weights[r].exponent;
            }
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                const int number = m * kTiles + n;
                if (number > 0 && number % kAhead == 0) divide_schedule(size, kFirstPlace + number);
                uint32_t kept[4];
                load_words<4>(kept, &tile_of(m, n));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    O.rmem[m][n][i] = weights[i / 2].join(__uint_as_float(kept[i]), O.rmem[m][n][i]);
                }
            }
        }
    }

  private:
    // Tiles that are read before they are joined: as many as ptxas finds registers for.
    static constexpr bool kFewAhead =
        Kernel::m_tiles > 1 && Kernel::d_head > 64 && !Kernel::traits.causal && !Kernel::traits.window;
    static constexpr int kAhead = kFewAhead ? 8 : 16;
    static constexpr int kFirstPlace = 1000;  // behind those of products

    FLASH_DEVICE float4 &rows_of(int m) const { return own[m * (1 + kTiles) * Kernel::n_threads]; }
    FLASH_DEVICE float4 &tile_of(int m, int n) const {
        return own[(m * (1 + kTiles) + 1 + n) * Kernel::n_threads];
    }
};

}  // namespace flash::ampere
