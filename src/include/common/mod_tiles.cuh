// Which tiles of keys a kernel with a mod visits for a block of queries: not those that its mask leaves
// empty. Bounds of the mask's values tell (mod_ranges.cuh), or bits that a kernel has written before
// (ModTiles), by which of them the mod can be told.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/cuda_utils.cuh"
#include "common/mod.cuh"
#include "common/mod_ranges.cuh"
#include "common/tile_kind.cuh"

namespace flash {

// A tile that is visited, with what its mask leaves of it.
struct Visited {
    int kv_block;
    TileKind kind;
};

// The tiles of B_c keys for the queries first_row … last_row of one head, from the last to the first.
template <typename Mod, int B_c>
struct VisitedTiles {
    static constexpr bool kReadsBits = Mod::kHidesKeys && !Mod::kBoundsDecide;

    const typename Mod::Captured &captured;
    const ModTiles &tiles;
    int batch, head;
    int q_block;
    int first_row, last_row;  // both exist
    int seq_len_k;

    // The first tile that is visited of first … end - 1: where all are empty, the last one, of which every
    // query sees nothing.
    FLASH_DEVICE Visited first_of(int end, int first) const {
        const Visited found = last_visited(end - 1, first);
        return found.kv_block < first ? Visited{end - 1, TileKind::PARTIAL} : found;
    }

    // The tile behind kv_block; first - 1: there is none. keeps_first: the first one is visited, whatever its
    // mask leaves of it.
    FLASH_DEVICE Visited behind(int kv_block, int first, bool keeps_first) const {
        const Visited found = last_visited(kv_block - 1, first);
        if (keeps_first && found.kv_block < first && kv_block > first) return {first, TileKind::PARTIAL};
        return found;
    }

    // The last tile that is not empty of first … kv_block; first - 1: there is none.
    FLASH_DEVICE Visited last_visited(int kv_block, int first) const {
        if constexpr (!Mod::kHidesKeys) return {kv_block, TileKind::FULL};
        if (kReadsBits && tiles.words != nullptr) return by_bits(kv_block, first);
        if constexpr (Mod::kBoundsTell) return by_bounds(kv_block, first);
        return {kv_block, TileKind::PARTIAL};
    }

  private:
    FLASH_DEVICE Visited by_bounds(int kv_block, int first) const {
        TileKind kind = TileKind::EMPTY;
#pragma unroll 1
        for (; kv_block >= first; --kv_block) {
            const int end = min_of((kv_block + 1) * B_c, seq_len_k);
            kind = tile_kind(Mod::tile(captured, batch, head, first_row, last_row, kv_block * B_c, end - 1));
            if (kind != TileKind::EMPTY) break;
        }
        return {kv_block, kind};
    }

    FLASH_DEVICE Visited by_bits(int kv_block, int first) const {
        const uint32_t *const words =
            tiles.words + batch * tiles.batch_stride + head * tiles.head_stride + q_block * tiles.row_stride;
        uint32_t up_to = 0;  // the tiles of a word up to kv_block, which is the highest
#pragma unroll 1
        while (kv_block >= first) {
            const int in_word = kv_block % kTilesAWord;
            up_to = __ldg(words + kv_block / kTilesAWord) << 2 * (kTilesAWord - 1 - in_word);
            if (up_to != 0) break;
            kv_block -= in_word + 1;
        }
        const int passed = __clz(up_to) / 2;  // 16 of a word without any
        return {max_of(kv_block - passed, first - 1), static_cast<TileKind>(up_to << 2 * passed >> 30)};
    }
};

// The same for a kernel that may hide no keys by a mod, with the tile in hand.
template <typename Kernel, bool kHidesKeys = Kernel::mod_hides_keys>
struct TileWalk {
    VisitedTiles<typename Kernel::Mod, Kernel::B_c> tiles;
    int first;                          // tiles before it are none
    TileKind kind = TileKind::PARTIAL;  // what the mask leaves of the tile in hand

    // The tile behind kv_block. Under a window the first one is always visited.
    FLASH_DEVICE int behind(int kv_block) {
        const Visited next = tiles.behind(kv_block, first, Kernel::traits.window);
        kind = next.kind;
        return next.kv_block;
    }
};
template <typename Kernel>
struct TileWalk<Kernel, false> {
    static constexpr TileKind kind = TileKind::FULL;

    FLASH_DEVICE int behind(int kv_block) { return kv_block - 1; }
};

}  // namespace flash
