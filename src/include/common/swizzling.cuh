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
//
// This is the 128-byte swizzle of TMA and wgmma as well, if panels begin at multiples of 1024 bytes, the
// pattern's period.
#pragma once

#include "common/cuda_utils.cuh"

namespace flash {

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = kPanelColumns * kElementBytes;  // 128
inline constexpr int kPanelChunks = kPanelRowBytes / kChunkBytes;     // of a row: 8
inline constexpr int kSwizzleRows = 8;
inline constexpr int kSwizzleBytes = kSwizzleRows * kPanelRowBytes;  // 1024

// The position of chunk `chunk` (0 … 7) of a panel's row. row8: the row modulo 8.
template <typename Int>
FLASH_HOST_DEVICE constexpr Int swizzled(Int row8, Int chunk) {
    return chunk ^ row8;
}

// Panels of a tile d columns wide; the last one is padded with zeros.
FLASH_HOST_DEVICE constexpr int panel_count(int d) { return ceil_div(d, kPanelColumns); }

// Bytes of a (rows, d) tile.
FLASH_HOST_DEVICE constexpr int tile_bytes(int rows, int d) { return panel_count(d) * rows * kPanelRowBytes; }

// ---------------------------------------------------------------- a swizzled tile of any number of panels
// Byte offset of chunk `chunk` (columns 8 chunk ... 8 chunk + 7) from the start of its row, in a tile of
// `rows` rows. row8: the row modulo 8.
FLASH_HOST_DEVICE constexpr uint32_t chunk_in_row_offset(uint32_t rows, uint32_t row8, uint32_t chunk) {
    return (chunk / kPanelChunks) * (rows * kPanelRowBytes) +
           swizzled(row8, chunk % kPanelChunks) * kChunkBytes;
}

// The same from the start of the tile.
FLASH_HOST_DEVICE constexpr uint32_t chunk_offset(uint32_t rows, uint32_t row, uint32_t chunk) {
    return row * kPanelRowBytes + chunk_in_row_offset(rows, row % kSwizzleRows, chunk);
}

// ---------------------------------------------------------------- a tile that mma.sync reads by fragments
template <int kRows, int kDHead, bool kSwizzled>
struct SmemTile {
    static constexpr int row_bytes = kPanelRowBytes;
    static constexpr int row_chunks = kPanelChunks;
    static_assert(kRows % kSwizzleRows == 0, "a tile has a multiple of 8 rows, the period of the swizzle");
    static_assert(kDHead % kPanelColumns == 0, "d_head must be a multiple of 64, the width of a panel");

    static constexpr int rows = kRows;
    static constexpr int panels = panel_count(kDHead);
    static constexpr int panel_bytes = kRows * row_bytes;
    static constexpr int bytes = tile_bytes(kRows, kDHead);

    // Byte offset of chunk `chunk` (0 … kDHead / 8 - 1) of row `row` from the tile's begin.
    static FLASH_HOST_DEVICE constexpr uint32_t offset(int row, int chunk) {
        const int column = chunk % row_chunks;
        const int position = kSwizzled ? swizzled(row % kSwizzleRows, column) : column;
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
