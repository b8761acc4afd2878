// S = Q K^T of one warp's 16 rows once more, by mma.sync: the way out of a tile whose scores jumped so far
// above the lagged reference that P overflowed. A warp can take it alone, since the accumulator of mma.sync
// has the layout of wgmma's; Q and K are still in shared memory.
#pragma once

#include "hopper/layout.cuh"
#include "hopper/ptx_sm90.cuh"

namespace flash::hopper {

// smem_Q (B_r, d), smem_K (B_c, d): addresses of the tiles. first_row: of the warp's rows, in the Q tile.
// rmem_S: what scores begin at.
template <typename Kernel>
FLASH_DEVICE void recompute_scores(float (&rmem_S)[Kernel::B_c / 2], uint32_t smem_Q, uint32_t smem_K,
                                   uint32_t first_row, uint32_t lane) {
    auto *const squares =
        reinterpret_cast<float (*)[4]>(rmem_S);          // 8 keys each, in wgmma's order as in mma's
    const uint32_t matrix = lane >> 3, row8 = lane & 7;  // this lane addresses row `row8` of matrix `matrix`
    // Q: matrices 0, 1 are rows 0-7 and 8-15 of columns 0-7; 2, 3 the same of columns 8-15.
    // K: matrices 0, 1 are columns 0-7 and 8-15 of rows 0-7; 2, 3 the same of rows 8-15.
    const uint32_t smem_Q_row = smem_Q + (first_row + (matrix & 1) * 8 + row8) * kPanelRowBytes;
    const uint32_t smem_K_row = smem_K + ((matrix >> 1) * 8 + row8) * kPanelRowBytes;
#pragma unroll 1
    for (uint32_t k = 0; k < Kernel::d_head / kMmaDepth; ++k) {
        uint32_t q[4];
        ldmatrix(q, smem_Q_row + chunk_in_row_offset(Kernel::B_r, row8, k * 2 + (matrix >> 1)));
        const uint32_t smem_K_chunk =
            smem_K_row + chunk_in_row_offset(Kernel::B_c, row8, k * 2 + (matrix & 1));
#pragma unroll
        for (int j = 0; j < Kernel::B_c / 16; ++j) {
            uint32_t keys[4];
            ldmatrix(keys, smem_K_chunk + j * 16 * kPanelRowBytes);
            mma<Kernel::dtype>(squares[2 * j], q, keys[0], keys[1]);
            mma<Kernel::dtype>(squares[2 * j + 1], q, keys[2], keys[3]);
        }
    }
}

}  // namespace flash::hopper
