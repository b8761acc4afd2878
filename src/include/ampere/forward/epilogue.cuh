// O / l, rounded once, and the log-sum-exp of every row, to global memory.
//
// A thread's accumulators are scattered over rows, 4 bytes here and there. They go through the warp's
// own rows of the Q tile, which nobody else reads, and leave as whole 128-byte lines, 16 bytes a thread.
#pragma once

#include "ampere/forward/softmax.cuh"
#include "ampere/gemm.cuh"
#include "ampere/load_store.cuh"
#include "common/mask.cuh"

namespace flash::ampere {

template <typename Kernel>
struct Epilogue {
    using Tile = typename Kernel::QTile;
    static constexpr int lane_rows = kWarpSize / Tile::row_chunks;  // rows a warp stores at once: 4
    static constexpr int warp_panels = Tile::panels / Kernel::warps_per_group;

    uint32_t smem_O;  // the Q tile
    int warp_row;     // the warp's first row in it
    int first_panel;  // the warp's columns of it
    int first_row;    // the query of that row
    Mask<Kernel::traits> mask;
    float weight_scale;  // of O, with dropout

    // `sink`: the head's sink, if it has one; `gmem_O`: the head's output; `lse`: its log-sum-exp
    // (seq_len_q), nullptr if not wanted. The warp has read its Q rows for the last time.
    FLASH_DEVICE void store(const Output<Kernel> &O, const OnlineSoftmax<Kernel> &softmax, float sink,
                            const GlobalMatrix &gmem_O, float *lse) const {
        const int lane = threadIdx.x % kWarpSize;
        __syncwarp();  // all lanes are done with Q: its rows may be overwritten
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < kRowsPerThread; ++r) {
                const int row = m * kMmaM + accumulator(lane, 2 * r).row;
                const int query = first_row + row;
                const float l = softmax.total(m, r);
                const RowEnd end =
                    Kernel::traits.sinks ? softmax.end_row(m, r, l, sink) : softmax.end_row(m, r, l);
                stage_row(O, m, r, warp_row + row, factor_of(end));
                if (lse != nullptr && lane % 4 == 0 && query < mask.seq_len_q) lse[query] = end.lse;
            }
        }
        __syncwarp();  // the warp's rows of O are complete
        copy_rows(gmem_O);
    }

    // The part of a split kernel: O / l and the log-sum-exp of the keys of this part, in fp32; of a chunk of
    // keys what chunks.cuh says, with pairs in the place of log-sum-exps. `partial_o`:
    // (seq_len_q, d_head_v), contiguous; `partial_lse`: (seq_len_q). A quad writes 32 bytes of a row at once,
    // a whole sector.
    FLASH_DEVICE void store_partial(const Output<Kernel> &O, const OnlineSoftmax<Kernel> &softmax,
                                    float *partial_o, float *partial_lse, int d_head_v) const {
        constexpr bool chunks = Kernel::chunk_tiles > 0;
        const int lane = threadIdx.x % kWarpSize;
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < kRowsPerThread; ++r) {
                const int query = first_row + m * kMmaM + accumulator(lane, 2 * r).row;
                const float l = softmax.total(m, r);  // of all lanes, before some leave
                if (query >= mask.seq_len_q) continue;
                const RowEnd end = chunks ? RowEnd{1.0f, 0.0f} : softmax.end_row(m, r, l);
                const float factor = factor_of(end);
                float *row = partial_o + int64_t(query) * d_head_v + accumulator(lane, 0).column;
#pragma unroll
                for (int n = 0; n < Kernel::d_head / kMmaN; ++n) {
                    if (Kernel::traits.padded_head && n * kMmaN >= d_head_v) continue;
                    const float (&tile)[4] = O.rmem[m][n];
                    *reinterpret_cast<float2 *>(row + n * kMmaN) =
                        make_float2(tile[2 * r] * factor, tile[2 * r + 1] * factor);
                }
                if (lane % 4 != 0) continue;
                if constexpr (chunks) {
                    reinterpret_cast<float2 *>(partial_lse)[query] =
                        make_float2(softmax.row_exponent(m, r), l);
                } else {
                    partial_lse[query] = end.lse;
                }
            }
        }
    }

  private:
    FLASH_DEVICE float factor_of(const RowEnd &end) const {
        return Kernel::drops ? end.factor * weight_scale : end.factor;
    }

    FLASH_DEVICE void stage_row(const Output<Kernel> &O, int m, int r, int tile_row, float factor) const {
        const int in_chunk = accumulator(threadIdx.x % kWarpSize, 0).column * kElementBytes;
#pragma unroll
        for (int n = 0; n < Kernel::warp_d / kMmaN; ++n) {  // an 8-column tile is a chunk
            const float (&tile)[4] = O.rmem[m][n];
            store_shared(smem_O + first_panel * Tile::panel_bytes + Tile::offset(tile_row, n) + in_chunk,
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
            for (int panel = 0; panel < warp_panels; ++panel) {
                const int chunk = (first_panel + panel) * Tile::row_chunks + lane_chunk;
                if (Kernel::traits.padded_head && chunk >= gmem_O.chunks) break;
                store_global(gmem + chunk * kChunkBytes,
                             load_shared(smem_O + Tile::offset(warp_row + row, chunk)));
            }
        }
    }
};

}  // namespace flash::ampere
