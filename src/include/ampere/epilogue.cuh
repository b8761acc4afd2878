// O / l, rounded once, and the log-sum-exp of every row, to global memory.
//
// A thread's accumulators are scattered over rows, 4 bytes here and there. They go through the warp's
// own rows of the Q tile, which nobody else reads, and leave as whole 128-byte lines, 16 bytes a thread.
#pragma once

#include "ampere/gemm.cuh"
#include "ampere/load_store.cuh"
#include "ampere/softmax.cuh"
#include "mask.cuh"

namespace flash::ampere {

template <typename Kernel>
struct Epilogue {
    using Tile = typename Kernel::QTile;
    static constexpr int lane_rows = kWarpSize / Tile::row_chunks;  // rows a warp stores at once: 4

    uint32_t smem_O;  // the Q tile
    int warp_row;     // the warp's first row in it
    int first_row;    // the query of that row
    Mask<Kernel::traits> mask;

    // `O`: the head's output; `lse`: its row of (batch, heads, seq_len_q), nullptr if not wanted.
    // The warp has read its Q rows for the last time.
    FLASH_DEVICE void store(const Output<Kernel> &O, const OnlineSoftmax<Kernel> &softmax,
                            const GlobalMatrix &gmem_O, float *lse) const {
        const int lane = threadIdx.x % kWarpSize;
        __syncwarp();  // all lanes are done with Q: its rows may be overwritten
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < kRowsPerThread; ++r) {
                const int row = m * kMmaM + accumulator(lane, 2 * r).row;
                const int query = first_row + row;
                const bool sees_nothing = mask.visible_end(query) == 0;
                const float l = softmax.total(m, r);
                // A sum of 0 in a row that does see keys is no empty row: its scores are all -inf, and
                // 0 * (1 / 0) shows that as NaN.
                const float inverse = sees_nothing ? 0.0f : reciprocal_approx(l);
                stage_row(O, m, r, warp_row + row, inverse);
                if (lse != nullptr && lane % 4 == 0 && query < mask.seq_len_q) {
                    lse[query] = sees_nothing ? -INFINITY : softmax.log_sum_exp(m, r, l);
                }
            }
        }
        __syncwarp();  // the warp's rows of O are complete
        copy_rows(gmem_O);
    }

  private:
    FLASH_DEVICE void stage_row(const Output<Kernel> &O, int m, int r, int tile_row, float factor) const {
        const int in_chunk = accumulator(threadIdx.x % kWarpSize, 0).column * kElementBytes;
#pragma unroll
        for (int n = 0; n < Kernel::d_head / kMmaN; ++n) {  // an 8-column tile is a chunk
            const float (&tile)[4] = O.rmem[m][n];
            store_shared(smem_O + Tile::offset(tile_row, n) + in_chunk,
                         pack<Kernel::dtype>(tile[2 * r] * factor, tile[2 * r + 1] * factor));
        }
    }

    FLASH_DEVICE void copy_rows(const GlobalMatrix &gmem_O) const {
        const int lane = threadIdx.x % kWarpSize;
        const int lane_row = lane / Tile::row_chunks;
        const int lane_chunk = lane % Tile::row_chunks;
#pragma unroll
        for (int i = 0; i < Kernel::warp_rows / lane_rows; ++i) {
            const int row = lane_row + i * lane_rows;
            if (first_row + row >= mask.seq_len_q) break;
            char *gmem = const_cast<char *>(gmem_O.begin) + (first_row + row) * gmem_O.row_bytes;
#pragma unroll
            for (int panel = 0; panel < Tile::panels; ++panel) {
                const int chunk = panel * Tile::row_chunks + lane_chunk;
                store_global(gmem + chunk * kChunkBytes,
                             load_shared(smem_O + Tile::offset(warp_row + row, chunk)));
            }
        }
    }
};

}  // namespace flash::ampere
