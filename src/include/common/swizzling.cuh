// Where the 16-byte chunks of a Q, K or V tile lie in shared memory.
//
// A tile of (rows, d_head) elements is cut into panels of 64 columns, stored one after the other:
// smem[panel][row][position]. A row of a panel is 128 bytes, all 32 banks exactly once; it holds 8
// chunks (8 elements, 4 banks each). With the swizzle, chunk c of row r stands at position c ^ (r % 8):
//
//     position    0 1 2 3 4 5 6 7
//     row 0       0 1 2 3 4 5 6 7        ldmatrix reads one chunk of 8 neighbouring rows at a time:
//     row 1       1 0 3 2 5 4 7 6        a column of the plain layout is always the same 4 banks
//     row 2       2 3 0 1 6 7 4 5        (8 accesses instead of 1), a chunk number of this picture
//     row 3       3 2 1 0 7 6 5 4        stands at 8 different positions, hence in all 32 banks.
//     ...                                Copies, which walk along rows, are free of conflicts in both.
//     row 7       7 6 5 4 3 2 1 0
//
// As bits of the byte offset within a panel:   r r r r R R R c c c b b b b
//                                                      |_|_|__^ ^ ^           c ^= R
#pragma once

#include "common/cuda_utils.cuh"

namespace flash {

template <int kRows, int kDHead, bool kSwizzled>
struct SmemTile {
    static constexpr int panel_columns = 64;
    static constexpr int row_bytes = panel_columns * kElementBytes;  // 128
    static constexpr int row_chunks = row_bytes / kChunkBytes;       // 8
    static_assert(kRows % 8 == 0, "a tile has a multiple of 8 rows, the period of the swizzle");
    static_assert(kDHead % panel_columns == 0, "d_head must be a multiple of 64, the width of a panel");

    static constexpr int rows = kRows;
    static constexpr int panels = kDHead / panel_columns;
    static constexpr int panel_bytes = kRows * row_bytes;
    static constexpr int bytes = panels * panel_bytes;

    // Byte offset of chunk `chunk` (0 … kDHead / 8 - 1) of row `row` from the tile's begin.
    static FLASH_HOST_DEVICE constexpr uint32_t offset(int row, int chunk) {
        const int column = chunk % row_chunks;
        const int position = kSwizzled ? column ^ (row % 8) : column;
        return (chunk / row_chunks) * panel_bytes + row * row_bytes + position * kChunkBytes;
    }

    // offset(row + 16 * row_tile, chunk + 2 * column_tile), from lane_offset = offset(row, chunk) of
    // a chunk 0 or 1. Tile numbers are compile-time constants where this is called, so that an access
    // costs at most one XOR; the rest is the instruction's immediate. A tile's address, a multiple of
    // 128, may be contained in lane_offset.
    static FLASH_HOST_DEVICE constexpr uint32_t fragment_offset(uint32_t lane_offset, int row_tile,
                                                                int column_tile) {
        const uint32_t step = column_step(column_tile);
        return (kSwizzled ? lane_offset ^ step : lane_offset + step) + tile_offset(row_tile, column_tile);
    }

    // What fragment_offset is made of: where a column tile stands in its panel, to be XORed (or added,
    // without swizzle) to lane_offset, and the rest. Column tiles that are 4 apart have the same step.
    static constexpr int panel_tiles = row_chunks / 2;
    static FLASH_HOST_DEVICE constexpr uint32_t column_step(int column_tile) {
        return (column_tile % panel_tiles) * (2 * kChunkBytes);
    }
    static FLASH_HOST_DEVICE constexpr uint32_t tile_offset(int row_tile, int column_tile) {
        return (column_tile / panel_tiles) * panel_bytes + row_tile * (16 * row_bytes);
    }
};

}  // namespace flash
