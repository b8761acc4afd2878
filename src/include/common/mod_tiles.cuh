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

// What the mask leaves of a tile for each of several groups of rows, 2 bits each.
struct TileKinds {
    uint32_t bits;

    FLASH_DEVICE TileKind of(int group) const { return static_cast<TileKind>(bits >> 2 * group & 3); }
    FLASH_DEVICE void set(int group, TileKind kind) { bits |= static_cast<uint32_t>(kind) << 2 * group; }
    static FLASH_DEVICE TileKinds all(int n_groups, TileKind kind) {
        TileKinds kinds{0};
#pragma unroll
        for (int group = 0; group < n_groups; ++group) kinds.set(group, kind);
        return kinds;
    }
};

// How the kinds of a row of tiles lie in words, each of several groups of rows.
template <int kGroups>
struct TilesOfWord {
    static constexpr int kKinds = kGroups <= 2 ? kGroups : 4;  // of a tile; those of no group are EMPTY
    static constexpr int kBits = 2 * kKinds, kTiles = kKindsAWord / kKinds;
    static_assert(kGroups >= 1 && kGroups <= 4);
};

// A tile that is visited.
struct Visited {
    int kv_block;
    TileKinds kinds;
};

// The tiles of B_c keys for the queries first_row … last_row of one head, from the last to the first. These
// are kGroups groups of rows, of which the last ones may not exist.
template <typename Mod, int B_c, int kGroups = 1>
struct VisitedTiles {
    static constexpr bool kReadsBits = Mod::kHidesKeys && !Mod::kBoundsDecide;

    const typename Mod::Captured &captured;
    const ModTiles &tiles;
    int batch, head;
    int q_block;
    int first_row, last_row;  // both exist
    int seq_len_k;
    int group_rows = 0;  // of several groups

    // The first tile that is visited of first … end - 1: where all are empty, the last one, of which every
    // query sees nothing.
    FLASH_DEVICE Visited first_of(int end, int first) const {
        const Visited found = last_visited(end - 1, first);
        return found.kv_block < first ? Visited{end - 1, all(TileKind::PARTIAL)} : found;
    }

    // The tile behind kv_block; first - 1: there is none. keeps_first: the first one is visited, whatever its
    // mask leaves of it.
    FLASH_DEVICE Visited behind(int kv_block, int first, bool keeps_first) const {
        const Visited found = last_visited(kv_block - 1, first);
        if (keeps_first && found.kv_block < first && kv_block > first) return {first, all(TileKind::PARTIAL)};
        return found;
    }

    // The last tile that is not empty of first … kv_block; first - 1: there is none.
    FLASH_DEVICE Visited last_visited(int kv_block, int first) const {
        if constexpr (!Mod::kHidesKeys) return {kv_block, all(TileKind::FULL)};
        if (kReadsBits && tiles.words != nullptr) return by_bits(kv_block, first);
        if constexpr (Mod::kBoundsTell) return by_bounds(kv_block, first);
        return {kv_block, all(TileKind::PARTIAL)};
    }

    static FLASH_DEVICE TileKinds all(TileKind kind) { return TileKinds::all(kGroups, kind); }

  private:
    // Of a tile that is neither empty nor full the bounds are looked at once more for each group.
    FLASH_DEVICE Visited by_bounds(int kv_block, int first) const {
        TileKinds kinds{0};
        int group = -1;  // all of them
#pragma unroll 1
        while (kv_block >= first && group < kGroups) {
            const int row = group < 0 ? first_row : first_row + group * group_rows;
            const int end_row = group < 0 ? last_row : min_of(row + group_rows - 1, last_row);
            const int end = min_of((kv_block + 1) * B_c, seq_len_k);
            TileKind kind =
                tile_kind(Mod::tile(captured, batch, head, row, end_row, kv_block * B_c, end - 1));
            if (row > last_row) kind = TileKind::EMPTY;
            if (group >= 0) {
                kinds.set(group++, kind);
            } else if (kind == TileKind::EMPTY) {
                --kv_block;
            } else if (kGroups == 1 || kind == TileKind::FULL) {
                return {kv_block, all(kind)};
            } else {
                group = 0;
            }
        }
        return {kv_block, kinds};
    }

    FLASH_DEVICE Visited by_bits(int kv_block, int first) const {
        using Word = TilesOfWord<kGroups>;
        const uint32_t *const words =
            tiles.words + batch * tiles.batch_stride + head * tiles.head_stride + q_block * tiles.row_stride;
        uint32_t up_to = 0;  // the tiles of a word up to kv_block, which is the highest
#pragma unroll 1
        while (kv_block >= first) {
            const int in_word = kv_block % Word::kTiles;
            up_to = __ldg(words + kv_block / Word::kTiles) << Word::kBits * (Word::kTiles - 1 - in_word);
            if (up_to != 0) break;
            kv_block -= in_word + 1;
        }
        const int passed = __clz(up_to) / Word::kBits;  // all of a word without any
        return {max_of(kv_block - passed, first - 1),
                TileKinds{up_to << Word::kBits * passed >> (32 - Word::kBits)}};
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
        kind = next.kinds.of(0);
        return next.kv_block;
    }
};
template <typename Kernel>
struct TileWalk<Kernel, false> {
    static constexpr TileKind kind = TileKind::FULL;

    FLASH_DEVICE int behind(int kv_block) { return kv_block - 1; }
};

}  // namespace flash
