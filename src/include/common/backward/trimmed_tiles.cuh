// Tiles at the ends of a range that the mask of a mod leaves empty, as far as bounds of its values tell
// (mod_ranges.cuh): backward kernels do not visit them. What lies between is visited.
#pragma once

#include "common/backward/visible_rows.cuh"
#include "common/mod.cuh"
#include "common/mod_ranges.cuh"

namespace flash {

// kOfOneHead: the tiles are visited for one query head, not for a group of them.
template <typename Mod, bool kOfOneHead>
FLASH_HOST_DEVICE constexpr bool trims_tiles() {
    if constexpr (is_mod<Mod>) {
        return Mod::kHidesKeys && Mod::kBoundsTell && (kOfOneHead || !Mod::kMaskHasHead);
    }
    return false;
}

// `truth(tile)`: bounds of the mask over a tile.
template <typename Truth>
FLASH_DEVICE Range without_empty_ends(Range tiles, const Truth &truth) {
#pragma unroll 1
    while (tiles.begin < tiles.end && !truth(tiles.begin).high) ++tiles.begin;
#pragma unroll 1
    while (tiles.begin < tiles.end && !truth(tiles.end - 1).high) --tiles.end;
    return tiles.begin < tiles.end ? tiles : Range{0, 0};
}

// Tiles of B_r queries that see some of `keys`, which exist, in any head.
template <typename Mod, int B_r>
FLASH_DEVICE Range trimmed_query_tiles(const typename Mod::Captured &captured, Range tiles, Range keys,
                                       int seq_len_q, int batch) {
    return without_empty_ends(tiles, [&](int tile) {
        const int end = min_of((tile + 1) * B_r, seq_len_q);
        return Mod::tile(captured, batch, 0, tile * B_r, end - 1, keys.begin, keys.end - 1);
    });
}

// Tiles of B_c keys of which some query of `rows`, which exist, sees some.
template <typename Mod, int B_c>
FLASH_DEVICE Range trimmed_key_tiles(const typename Mod::Captured &captured, Range tiles, Range rows,
                                     int seq_len_k, int batch, int head) {
    return without_empty_ends(tiles, [&](int tile) {
        const int end = min_of((tile + 1) * B_c, seq_len_k);
        return Mod::tile(captured, batch, head, rows.begin, rows.end - 1, tile * B_c, end - 1);
    });
}

}  // namespace flash
