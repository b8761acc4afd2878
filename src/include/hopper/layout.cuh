// How a warpgroup's wgmma sees its operands: fragments in registers, and descriptors of swizzled tiles in
// shared memory (swizzling.cuh). Plain constexpr functions, the same on host and device; tests/cpp checks
// them on the host.
#pragma once

#include <cstdint>

#include "common/fragments.cuh"
#include "common/swizzling.cuh"

namespace flash::hopper {

inline constexpr int kWarpgroupRows = 64;  // rows of one wgmma
inline constexpr int kMmaDepth = kMmaK;    // reduction length of one wgmma

// Other head sizes are padded by the caller to one of these.
constexpr bool is_head_size(int d) { return d == 64 || d == 96 || d == 128 || d == 192 || d == 256; }

// ---------------------------------------------------------------- fragments
// A warpgroup's accumulator of shape (64, n) holds, in thread `lane` of warp `warp`, at index i, the element
// `accumulator(lane, i)` of the warp's 16 rows (fragments.cuh): row = 16 warp + accumulator(lane, i).row.
// Each thread has elements of two rows, r = 0 and 1.
//
// Packed in pairs, the accumulator of S is the A operand of P V: no data moves between lanes.

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

// Q and K: reduction step k (16 columns of d) of a tile of `rows` rows, whose panels begin every
// `panel_step` columns. Inside a panel the address moves by 32 bytes: the swizzle applies to the sum.
FLASH_HOST_DEVICE constexpr uint32_t column_step(int k, int rows, int panel_step = kPanelColumns) {
    const int column = k * kMmaDepth;
    return descriptor_step(column / panel_step * rows * kPanelRowBytes + column % panel_step * 2);
}

// V: reduction step k (16 rows).
FLASH_HOST_DEVICE constexpr uint32_t row_step(int k) {
    return descriptor_step(k * kMmaDepth * kPanelRowBytes);
}

}  // namespace flash::hopper
