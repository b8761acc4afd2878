// What the mask of a mod leaves of tiles, for backward kernels. They do not visit empty tiles at the ends of
// a range; what lies between is visited. Bounds of the mask's values tell (mod_ranges.cuh), or bits of tiles
// of kFoundRows queries and kFoundKeys keys that a kernel has written before (find_tiles.cuh), by which of
// them the mod can be told.
#pragma once

#include "common/backward/visible_rows.cuh"
#include "common/find_tiles.cuh"
#include "common/mod.cuh"
#include "common/mod_tiles.cuh"

namespace flash {

inline constexpr int kFoundRows = 64, kFoundKeys = 64;

template <typename Mod>
FLASH_HOST_DEVICE constexpr bool reads_found_tiles() {
    if constexpr (is_mod<Mod>) return Mod::kHidesKeys && !Mod::kBoundsDecide;
    return false;
}

// kOfOneHead: the tiles are visited for one query head, not for a group of them.
template <typename Mod, bool kOfOneHead>
FLASH_HOST_DEVICE constexpr bool trims_tiles() {
    if constexpr (is_mod<Mod>) {
        return Mod::kHidesKeys && (Mod::kBoundsTell || reads_found_tiles<Mod>()) &&
               (kOfOneHead || !Mod::kMaskHasHead);
    }
    return false;
}

// What the mask leaves of `keys` for `rows`, as far as is known. Where one of the two is empty, nothing.
template <typename Mod>
FLASH_DEVICE TileKind known_kind(const ModOfLaunch<Mod> &mod, int batch, int head, Range rows, Range keys) {
    if (rows.begin >= rows.end || keys.begin >= keys.end) return TileKind::EMPTY;
    if (reads_found_tiles<Mod>() && mod.tiles.words != nullptr) {
        const uint32_t *const words =
            mod.tiles.words + batch * mod.tiles.batch_stride + head * mod.tiles.head_stride;
        bool any = false, all = true;
#pragma unroll 1
        for (int row = rows.begin / kFoundRows; row <= (rows.end - 1) / kFoundRows; ++row) {
#pragma unroll 1
            for (int key = keys.begin / kFoundKeys; key <= (keys.end - 1) / kFoundKeys; ++key) {
                const uint32_t word = __ldg(words + row * mod.tiles.row_stride + key / kKindsAWord);
                const auto kind = static_cast<TileKind>(word >> 2 * (key % kKindsAWord) & 3);
                any = any || kind != TileKind::EMPTY;
                all = all && kind == TileKind::FULL;
            }
        }
        return all ? TileKind::FULL : any ? TileKind::PARTIAL : TileKind::EMPTY;
    }
    if constexpr (Mod::kBoundsTell) {
        return tile_kind(
            Mod::tile(mod.captured, batch, head, rows.begin, rows.end - 1, keys.begin, keys.end - 1));
    }
    return TileKind::PARTIAL;
}

// Of one of the tiles whose bits are found, which may lie behind the last row or key.
template <typename Mod>
FLASH_DEVICE TileKind known_kind_of_tile(const ModOfLaunch<Mod> &mod, int batch, int head, int row_tile,
                                         int key_tile, int seq_len_q, int seq_len_k) {
    const int row = row_tile * kFoundRows, key = key_tile * kFoundKeys;
    if (row >= seq_len_q || key >= seq_len_k) return TileKind::EMPTY;
    if (reads_found_tiles<Mod>() && mod.tiles.words != nullptr) {
        const int64_t word = batch * mod.tiles.batch_stride + head * mod.tiles.head_stride +
                             row_tile * mod.tiles.row_stride + key_tile / kKindsAWord;
        return static_cast<TileKind>(__ldg(mod.tiles.words + word) >> 2 * (key_tile % kKindsAWord) & 3);
    }
    if constexpr (Mod::kBoundsTell) {
        return tile_kind(Mod::tile(mod.captured, batch, head, row, min_of(row + kFoundRows, seq_len_q) - 1,
                                   key, min_of(key + kFoundKeys, seq_len_k) - 1));
    }
    return TileKind::PARTIAL;
}

// Called by whole warps. `sees` is asked by each lane of another tile: one after the other, each would wait
// for memory.
template <typename Sees>
FLASH_DEVICE Range without_empty_ends(Range tiles, const Sees &sees) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll 1
    while (tiles.begin < tiles.end) {
        const int tile = tiles.begin + lane;
        const uint32_t seen = __ballot_sync(kAllLanes, tile < tiles.end && sees(tile));
        tiles.begin += seen == 0 ? kWarpSize : __ffs(static_cast<int>(seen)) - 1;
        if (seen != 0) break;
    }
#pragma unroll 1
    while (tiles.begin < tiles.end) {
        const int tile = tiles.end - 1 - lane;
        const uint32_t seen = __ballot_sync(kAllLanes, tile >= tiles.begin && sees(tile));
        tiles.end -= seen == 0 ? kWarpSize : __ffs(static_cast<int>(seen)) - 1;
        if (seen != 0) break;
    }
    return tiles.begin < tiles.end ? tiles : Range{0, 0};
}

// Tiles of B_r queries that see some of `keys`, which exist, in any head.
template <typename Mod, int B_r>
FLASH_DEVICE Range trimmed_query_tiles(const ModOfLaunch<Mod> &mod, Range tiles, Range keys, int seq_len_q,
                                       int batch) {
    return without_empty_ends(tiles, [&](int tile) {
        const Range rows{tile * B_r, min_of((tile + 1) * B_r, seq_len_q)};
        return known_kind(mod, batch, 0, rows, keys) != TileKind::EMPTY;
    });
}

// Tiles of B_c keys of which some query of `rows`, which exist, sees some.
template <typename Mod, int B_c>
FLASH_DEVICE Range trimmed_key_tiles(const ModOfLaunch<Mod> &mod, Range tiles, Range rows, int seq_len_k,
                                     int batch, int head) {
    return without_empty_ends(tiles, [&](int tile) {
        const Range keys{tile * B_c, min_of((tile + 1) * B_c, seq_len_k)};
        return known_kind(mod, batch, head, rows, keys) != TileKind::EMPTY;
    });
}

// Writes the bits, where the launch has room for them.
template <typename Mod>
cudaError_t launch_find_tiles(const BackwardProblem &problem, cudaStream_t stream) {
    if constexpr (reads_found_tiles<Mod>()) {
        const ModTiles &tiles = problem.mod->tiles;
        const int64_t n_rows = ceil_div(problem.seq_len_q, kFoundRows);
        const int64_t n_words = ceil_div(ceil_div(problem.seq_len_k, kFoundKeys), kKindsAWord);
        const int64_t n_heads = tiles.head_stride == 0 ? 1 : problem.n_heads;
        const int64_t blocks = (tiles.batch_stride == 0 ? 1 : problem.batch) * n_heads * n_rows * n_words;
        if (tiles.words == nullptr || blocks == 0) return cudaSuccess;
        if (n_words > tiles.row_stride) return cudaErrorInvalidValue;
        if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
        TileFinder<Mod> finder{mod_of_launch<Mod>(*problem.mod),
                               const_cast<uint32_t *>(tiles.words),
                               problem.seq_len_q,
                               problem.seq_len_k,
                               static_cast<int>(n_heads),
                               static_cast<int>(n_rows),
                               static_cast<int>(n_words)};
        void *parameters[] = {&finder};
        const auto kernel =
            reinterpret_cast<const void *>(&find_tiles_kernel<Mod, kFoundRows, kFoundKeys, 1>);
        return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kFinderWarps * kWarpSize),
                                parameters, 0, stream);
    } else {
        return cudaSuccess;
    }
}

}  // namespace flash
