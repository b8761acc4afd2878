// dQ (B_r, d_head) = dS (B_r, B_c) K (B_c, d_head): a warp's part of a tile, and how it is added to the sums.
#pragma once

#include "ampere/backward/barriers.cuh"
#include "ampere/backward/products.cuh"
#include "common/backward/dq_sums.cuh"
#include "common/backward/row_store.cuh"
#include "common/backward/visible_rows.cuh"

namespace flash::ampere {

template <typename Kernel>
struct QueryGradient {
    using Part = ampere::Sums<Kernel::dq_m_tiles, Kernel::dq_columns / kMmaN>;

    // Its columns are 16 here and 16 there: tiles column_warp, column_warp + dq_column_warps, ... so that all
    // of them stand at places of their panels that differ by a constant.
    uint32_t smem_dS, smem_K;
    uint32_t lane_dS, lane_K;
    int first_row_tile, first_column_tile;  // of 16

    // `warp`: among those that make dQ together.
    FLASH_DEVICE QueryGradient(uint32_t smem, int warp, int lane) {
        const LaneRows rows(lane);
        const int row_warp = warp % Kernel::dq_row_warps, column_warp = warp / Kernel::dq_row_warps;
        first_row_tile = row_warp * Kernel::dq_m_tiles;
        first_column_tile = column_warp;
        smem_dS = smem + Kernel::smem_dS + Kernel::ScoreTile::tile_offset(0, first_row_tile);
        smem_K = smem + Kernel::smem_K;
        lane_dS = Kernel::ScoreTile::fragment_offset(
            Kernel::ScoreTile::offset(rows.right.row, rows.right.chunk), 0, first_row_tile % 4);
        lane_K = Kernel::KTile::fragment_offset(Kernel::KTile::offset(rows.down.row, rows.down.chunk), 0,
                                                column_warp);
    }

    FLASH_DEVICE void multiply_into(Part &dQ, int slot) const {
        const uint32_t dS = smem_dS + slot * Kernel::ScoreTile::bytes;
        auto A = streamed<Kernel::dq_m_tiles>([&](auto &fragment, int step) {
#pragma unroll
            for (int m = 0; m < Kernel::dq_m_tiles; ++m) {
                ldmatrix_transposed(fragment.rmem[m],
                                    Kernel::ScoreTile::fragment_offset(lane_dS, step, m) + dS);
            }
        });
        multiply<Kernel::dtype, Kernel::B_c / kMmaTile>(dQ, A, [&](uint32_t (&B)[4], int step, int n) {
            ldmatrix_transposed(
                B, Kernel::KTile::fragment_offset(lane_K, step, n * Kernel::dq_column_warps) + smem_K);
        });
    }

    // The sums of a tile of queries: where they begin, how many tiles of 16 rows there are, and their
    // columns.
    struct Sums {
        float *begin;
        int n_rows, n_columns;
    };

    // Calls action(m, n, sums) for each accumulator tile that has sums.
    template <typename Action>
    FLASH_DEVICE void for_each_tile(const Sums &tile, Action action) const {
        const int row_floats = kMmaM * (Kernel::traits.padded_head ? tile.n_columns : Kernel::d_head);
        float *sums = tile.begin + first_row_tile * row_floats + first_column_tile * (2 * kSumTileFloats);
#pragma unroll
        for (int m = 0; m < Kernel::dq_m_tiles; ++m) {
            if (first_row_tile + m >= tile.n_rows) break;
#pragma unroll
            for (int n = 0; n < Kernel::dq_columns / kMmaN; ++n) {
                const int column_tile = n / 2 * (2 * Kernel::dq_column_warps) + n % 2;
                const int column = (2 * first_column_tile + column_tile) * kMmaN;
                if (Kernel::traits.padded_head && column >= tile.n_columns) continue;
                action(m, n, sums + m * row_floats + column_tile * kSumTileFloats);
            }
        }
    }

    FLASH_DEVICE void add(const Part &dQ, const Sums &tile, int lane) const {
        for_each_tile(tile, [&](int m, int n, float *sums) { add_to_sums(sums, lane, dQ.rmem[m][n]); });
    }
    FLASH_DEVICE void begin(const Part &dQ, const Sums &tile, int lane) const {
        for_each_tile(tile, [&](int m, int n, float *sums) { store_sums(sums, lane, dQ.rmem[m][n]); });
    }
    // dQ plus what the others have added.
    FLASH_DEVICE void take(Part &dQ, const Sums &tile, int lane) const {
        for_each_tile(tile, [&](int m, int n, float *sums) {
            float others[4];
            read_sums(others, sums, lane);
#pragma unroll
            for (int i = 0; i < 4; ++i) dQ.rmem[m][n][i] += others[i];
        });
    }

    // The complete dQ, rounded once or not at all: rows of `rows`, counted from the tile's first one, which
    // lies at `gmem`.
    FLASH_DEVICE void store(const Part &dQ, char *gmem, int64_t row_bytes, Range rows, Range seeing,
                            int d_head, float softmax_scale, int lane) const {
#pragma unroll
        for (int m = 0; m < Kernel::dq_m_tiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = (first_row_tile + m) * kMmaM + 8 * half + lane / 4;
                char *gmem_row = gmem + row * row_bytes;
                const auto first_column_of = [&](int tile) {  // `tile`: of 16 columns, of the warp's
                    return (first_column_tile + tile * Kernel::dq_column_warps) * kMmaTile;
                };
                if constexpr (Kernel::traits.float_query_gradients) {
#pragma unroll
                    for (int n = 0; n < Kernel::dq_columns / kMmaN; ++n) {
                        const int column = first_column_of(n / 2) + n % 2 * kMmaN;
                        if (rows.has(row) && (!Kernel::traits.padded_head || column < d_head)) {
                            store_float_row(gmem_row + column * sizeof(float), dQ.rmem[m][n], half,
                                            softmax_scale, seeing.has(row), lane);
                        }
                    }
                } else {
#pragma unroll
                    for (int n = 0; n < Kernel::dq_columns / kMmaN; n += 4) {
                        Chunk chunk = row_chunk<Kernel::dtype>(dQ.rmem[m], n, half, softmax_scale, lane);
                        if (!seeing.has(row)) chunk = Chunk{};
                        const int column = first_column_of(n / 2 + lane % 4 / 2) + lane % 2 * kMmaN;
                        if (rows.has(row) && (!Kernel::traits.padded_head || column < d_head)) {
                            store_global(gmem_row + column * kElementBytes, chunk);
                        }
                    }
                }
            }
        }
    }
};

}  // namespace flash::ampere
