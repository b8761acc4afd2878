// dQ (B_r, d_head) = dS (B_r, B_c) K (B_c, d_head): a warp's part of a tile, and how it is added to the sums.
#pragma once

#include "ampere/backward/barriers.cuh"
#include "ampere/backward/products.cuh"
#include "common/backward/dq_sums.cuh"

namespace flash::ampere {

// Sums of a fixed order: the parts of a tile are added by one block of keys after the other, those with the
// lower numbers first. Blocks with lower numbers have started before, so whoever waits is waited for by none
// of those.
FLASH_DEVICE void wait_for_turn(const int *turn, int number, int lane) {
    if (lane == 0) {
        int now;
        do {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
        } while (now != number);
    }
    __syncwarp();
}
FLASH_DEVICE void end_turn(int *turn, int lane) {
    __syncwarp();
    if (lane == 0) {
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
    }
}

template <typename Kernel>
struct QueryGradient {
    using Part = Sums<Kernel::dq_m_tiles, Kernel::dq_columns / kMmaN>;

    // Its columns are 16 here and 16 there: tiles column_warp, column_warp + dq_column_warps, ... so that all
    // of them stand at places of their panels that differ by a constant.
    uint32_t smem_dS, smem_K;
    uint32_t lane_dS, lane_K;
    int first_row_tile, first_column_tile;  // of 16
    int part;

    // `warp`: among those that make dQ together.
    FLASH_DEVICE QueryGradient(uint32_t smem, int warp, int lane) : part(warp) {
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
        multiply<Kernel::dtype, Kernel::B_c / kMmaTile>(dQ, A, [&](uint32_t(&B)[4], int step, int n) {
            ldmatrix_transposed(B, Kernel::KTile::fragment_offset(lane_K, step, n * Kernel::dq_column_warps) + smem_K);
        });
    }

    // `tile`: the sums of the tile's first row.
    FLASH_DEVICE void add(const Part &dQ, float *tile, int lane) const {
        constexpr int row_floats = Kernel::d_head / kMmaN * kSumTileFloats;  // of 16 rows
        float *sums = tile + first_row_tile * row_floats + first_column_tile * (2 * kSumTileFloats);
#pragma unroll
        for (int m = 0; m < Kernel::dq_m_tiles; ++m) {
#pragma unroll
            for (int n = 0; n < Kernel::dq_columns / kMmaN; ++n) {
                const int tile = n / 2 * (2 * Kernel::dq_column_warps) + n % 2;
                add_to_sums(sums + m * row_floats + tile * kSumTileFloats, lane, dQ.rmem[m][n]);
            }
        }
    }
};

}  // namespace flash::ampere
