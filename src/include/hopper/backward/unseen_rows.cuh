// Rows of tiles that take no part: keys that no query sees, and queries that see no key, beside others of
// their tile that do.
//
// Their P and dS are 0. But products multiply by the rows themselves, which may hold anything, and 0 * NaN is
// NaN. So these rows become zeros in shared memory. Each warpgroup clears them for itself, before it issues
// the product: that another one's product reads what this one has cleared does no harm.
#pragma once

#include "common/backward/visible_rows.cuh"
#include "common/swizzling.cuh"
#include "hopper/ptx_sm90.cuh"

namespace flash::hopper {

// Rows `begin` ... `end` - 1 of a tile of (rows, columns), by the threads of a warpgroup. Rows are cleared
// whole: in which order the swizzle has their chunks does not matter.
template <int rows, int columns>
FLASH_DEVICE void clear_tile_rows(uint32_t tile, int begin, int end) {
    constexpr int kWarpgroup = 128;
#pragma unroll 1
    for (int i = begin * kPanelChunks + threadIdx.x % kWarpgroup; i < end * kPanelChunks; i += kWarpgroup) {
#pragma unroll
        for (int panel = 0; panel < panel_count(columns); ++panel) {
            store_shared(tile + panel * (rows * kPanelRowBytes) + i * kChunkBytes, make_int4(0, 0, 0, 0));
        }
    }
}

// Rows `begin` ... `begin` + n_rows - 1 of a tile whose first row is row first_row of the sequence.
struct RowsOfTile {
    int first_row;
    int begin, n_rows;
};

// Whether some of them are not in `used`, rows of the sequence.
FLASH_DEVICE bool has_unused(Range used, const RowsOfTile &of_tile) {
    const int first = of_tile.first_row + of_tile.begin;
    return used.begin > first || used.end < first + of_tile.n_rows;
}

// Clears these.
template <int rows, int columns>
FLASH_DEVICE void clear_unused(uint32_t tile, Range used, const RowsOfTile &of_tile) {
    const int begin = used.begin - of_tile.first_row, end = used.end - of_tile.first_row;
    const int last = of_tile.begin + of_tile.n_rows;
    clear_tile_rows<rows, columns>(tile, of_tile.begin, min(begin, last));
    clear_tile_rows<rows, columns>(tile, max(end, of_tile.begin), last);
}

// Before the products that read them. `barrier`: a named one of the warpgroup.
FLASH_DEVICE void show_cleared(int barrier) {
    fence_async_proxy();               // wgmma must see what was written
    named_barrier_sync(barrier, 128);  // ... by every thread
}

}  // namespace flash::hopper
