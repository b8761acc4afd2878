// Where elements live: tiles in shared memory and fragments in registers. Plain constexpr functions,
// the same on host and device; tests/cpp checks them on the host.
//
// A tile of (rows, d) 16-bit elements is stored as panels of 64 columns, one after the other, each
// (rows, 64) with 128-byte rows. Inside a panel the 16-byte chunks of a row are permuted by the lowest
// three bits of the row, as TMA's and wgmma's 128-byte swizzle do it:
//
//     byte address bits   ... 9 8 7 | 6 5 4 | 3 2 1 0
//                             row%8 | chunk | byte of the chunk
//     stored chunk      =  chunk ^ (row % 8)
//
// Hence eight rows of one chunk column fall into eight different chunks: no bank conflicts. Panels
// must start at multiples of 1024 bytes, the period of the pattern.
#pragma once

#include <cstdint>

#include "common/cuda_utils.cuh"

namespace flash::hopper {

inline constexpr int kPanelColumns = 64;    // elements of one 128-byte row
inline constexpr int kPanelRowBytes = 128;  //
inline constexpr int kChunkColumns = 8;     // elements of 16 bytes
inline constexpr int kSwizzleBytes = 1024;  // eight rows: the swizzle's period
inline constexpr int kWarpgroupRows = 64;   // rows of one wgmma
inline constexpr int kMmaDepth = 16;        // reduction length of one wgmma

// Panels of a tile d columns wide; the last one is padded with zeros.
FLASH_HOST_DEVICE constexpr int panel_count(int d) { return (d + kPanelColumns - 1) / kPanelColumns; }

// Bytes of a (rows, d) tile.
FLASH_HOST_DEVICE constexpr int tile_bytes(int rows, int d) { return panel_count(d) * rows * kPanelRowBytes; }

// Byte offset of 16-byte chunk `chunk` (columns 8 chunk ... 8 chunk + 7) from the start of its row, in a
// tile of `rows` rows. row8: the row modulo 8.
FLASH_HOST_DEVICE constexpr uint32_t chunk_in_row_offset(uint32_t rows, uint32_t row8, uint32_t chunk) {
    return (chunk >> 3) * (rows * kPanelRowBytes) + (((chunk & 7) ^ row8) << 4);
}

// The same from the start of the tile.
FLASH_HOST_DEVICE constexpr uint32_t chunk_offset(uint32_t rows, uint32_t row, uint32_t chunk) {
    return row * kPanelRowBytes + chunk_in_row_offset(rows, row & 7, chunk);
}

// ---------------------------------------------------------------- fragments
// A warpgroup's accumulator of shape (64, n) holds, in thread `lane` of warp `warp`, at index i:
//
//     row    = 16 warp + lane / 4 + 8 ((i / 2) % 2)         two rows a thread: r = 0, 1
//     column = 8 (i / 4) + 2 (lane % 4) + i % 2
//
//            columns  0 1   2 3   4 5   6 7 | 8 9 ...
//     row 0   lane    0     1     2     3   |  0        elements i = 0, 1      | 4, 5
//     row 1   lane    4     5     6     7   |  4
//     row 8   lane    0     1     2     3   |  0        elements i = 2, 3      | 6, 7
//
// Packed in pairs, the accumulator of S is the A operand of P V: no data moves between lanes.
FLASH_HOST_DEVICE constexpr int accumulator_row(int warp, int lane, int i) {
    return 16 * warp + lane / 4 + 8 * ((i / 2) % 2);
}

FLASH_HOST_DEVICE constexpr int accumulator_column(int lane, int i) {
    return 8 * (i / 4) + 2 * (lane % 4) + i % 2;
}

// Index of element e (in column order) of the thread's row r.
FLASH_HOST_DEVICE constexpr int row_element_index(int r, int e) { return (e / 2) * 4 + 2 * r + e % 2; }

// How many of its elements of one row (in column order) lane `lane` keeps when the tile's columns below
// `n_columns` are kept.
FLASH_HOST_DEVICE constexpr int kept_elements(int lane, int n_columns) {
    const int limit = n_columns - (lane & 3) * 2;
    const int rest = limit & 7;
    return limit < 0 ? 0 : (limit >> 3) * 2 + (rest < 2 ? rest : 2);
}

// ---------------------------------------------------------------- wgmma's shared memory descriptors
// Bits 0-13: address / 16; 16-29: leading byte offset / 16; 32-45: stride byte offset / 16; 62-63: 1 for
// the 128-byte swizzle. The stride byte offset is the distance of neighbouring groups of eight rows: always
// one period of the swizzle. The leading byte offset is used only where the reduction runs along the rows
// (V): the distance of neighbouring panels. So the upper word is the same for all; the lower one carries
// the position, and moves by bytes / 16 without ever overflowing into the upper.
inline constexpr uint32_t kDescriptorUpperWord = (kSwizzleBytes >> 4) | (1u << 30);

FLASH_HOST_DEVICE constexpr uint32_t descriptor_lower_word(uint32_t address, uint32_t leading_bytes) {
    return ((address & 0x3FFFF) >> 4) | (leading_bytes >> 4) << 16;
}

FLASH_HOST_DEVICE constexpr uint64_t make_descriptor(uint32_t lower_word) {
    return static_cast<uint64_t>(kDescriptorUpperWord) << 32 | lower_word;
}

// What to add to the lower word to move the address by a multiple of 16 bytes.
FLASH_HOST_DEVICE constexpr uint32_t descriptor_step(uint32_t bytes) { return bytes >> 4; }

// Q and K: reduction step k (16 columns of d) of a tile of `rows` rows. Inside a panel the address
// moves by 32 bytes: the swizzle applies to the sum.
FLASH_HOST_DEVICE constexpr uint32_t column_step(int k, int rows) {
    return descriptor_step((k / 4) * rows * kPanelRowBytes + (k % 4) * kMmaDepth * 2);
}

// V: reduction step k (16 rows).
FLASH_HOST_DEVICE constexpr uint32_t row_step(int k) {
    return descriptor_step(k * kMmaDepth * kPanelRowBytes);
}

}  // namespace flash::hopper
