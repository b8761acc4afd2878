// What a mask leaves of a tile of queries and keys.
#pragma once

#include "common/cuda_utils.cuh"
#include "common/mod_ranges.cuh"

namespace flash {

enum class TileKind { EMPTY = 0, PARTIAL = 1, FULL = 2 };  // flash_helpers.mods.tiles.Tile

FLASH_HOST_DEVICE constexpr TileKind tile_kind(mods::Truth bounds) {
    return bounds.low ? TileKind::FULL : bounds.high ? TileKind::PARTIAL : TileKind::EMPTY;
}

}  // namespace flash
