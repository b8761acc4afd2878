// Tiles, and the numbers of their rows, from global to shared memory, by the warps of one role.
#pragma once

#include "ampere/backward/static_kernel_configuration.cuh"
#include "common/backward/visible_rows.cuh"
#include "common/ptx.cuh"

namespace flash::ampere {

// 8 threads copy the 128 bytes of a panel's row, 16 bytes each. `first`: the matrix's row 0, of one head;
// `tile_row`: the row that the tile begins with. Only rows of `valid` are read, and of these `chunks` chunks
// where heads are padded; the place of everything else is filled with zeros.
template <typename Kernel, typename Tile>
FLASH_DEVICE void copy_tile(uint32_t smem, const char *first, int64_t row_bytes, int tile_row, Range valid,
                            int chunks, int thread) {
    constexpr int passes = Tile::rows / Kernel::copy_rows;
    const int chunk = thread % Tile::row_chunks;
    const int row = thread / Tile::row_chunks;
    const char *gmem = first + (tile_row + row) * row_bytes + chunk * kChunkBytes;
    const uint32_t target = smem + Tile::offset(row, chunk);
    const auto target_of = [&](int pass, int panel) {
        return target + panel * Tile::panel_bytes + pass * Kernel::copy_rows * Tile::row_bytes;
    };
    const auto next_pass = [&] {
        gmem += Kernel::copy_rows * row_bytes;
        asm volatile("" : "+l"(gmem));  // the addresses of panels are this one and an immediate
    };
    if (!Kernel::traits.padded_head && valid.begin <= tile_row && tile_row + Tile::rows <= valid.end) {
#pragma unroll
        for (int pass = 0; pass < passes; ++pass, next_pass()) {
#pragma unroll
            for (int panel = 0; panel < Tile::panels; ++panel) {
                cp_async(target_of(pass, panel), gmem + panel * Tile::row_bytes);
            }
        }
    } else {
#pragma unroll 1
        for (int pass = 0; pass < passes; ++pass, next_pass()) {
            const bool row_exists = valid.has(tile_row + row + pass * Kernel::copy_rows);
#pragma unroll
            for (int panel = 0; panel < Tile::panels; ++panel) {
                const bool exists =
                    row_exists && (!Kernel::traits.padded_head || panel * Tile::row_chunks + chunk < chunks);
                cp_async(target_of(pass, panel), exists ? gmem + panel * Tile::row_bytes : first, exists);
            }
        }
    }
}

// A tile's numbers of rows, 4 bytes each; 0 for rows that are not of `valid`.
template <typename Kernel>
FLASH_DEVICE void copy_row_numbers(uint32_t smem, const float *first, int tile_row, Range valid, int thread) {
    if (thread < Kernel::B_r) {
        const bool exists = valid.has(tile_row + thread);
        cp_async_number(smem + 4 * thread, exists ? first + tile_row + thread : first, exists);
    }
}

}  // namespace flash::ampere
