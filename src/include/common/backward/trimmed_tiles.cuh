// Tiles at the ends of a range that the mask of a mod leaves empty: backward kernels do not visit them. What
// lies between is visited. Bounds of the mask's values tell (mod_ranges.cuh), or bits of tiles of kFoundRows
// queries and kFoundKeys keys that a kernel has written before (find_tiles.cuh), by which of them the mod can
// be told.
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

// Whether the mask may show some of `keys` to some of `rows`, none of which is empty.
template <typename Mod>
FLASH_DEVICE bool may_see(const ModOfLaunch<Mod> &mod, int batch, int head, Range rows, Range keys) {
    if (reads_found_tiles<Mod>() && mod.tiles.words != nullptr) {
        const uint32_t *const words =
            mod.tiles.words + batch * mod.tiles.batch_stride + head * mod.tiles.head_stride;
        for (int row = rows.begin / kFoundRows; row <= (rows.end - 1) / kFoundRows; ++row) {
            for (int key = keys.begin / kFoundKeys; key <= (keys.end - 1) / kFoundKeys; ++key) {
                const uint32_t word = __ldg(words + row * mod.tiles.row_stride + key / kTilesAWord);
                if ((word >> 2 * (key % kTilesAWord) & 3) != static_cast<uint32_t>(TileKind::EMPTY)) {
                    return true;
                }
            }
        }
        return false;
    }
    if constexpr (Mod::kBoundsTell) {
        return Mod::tile(mod.captured, batch, head, rows.begin, rows.end - 1, keys.begin, keys.end - 1).high;
    }
    return true;
}

template <typename Sees>
FLASH_DEVICE Range without_empty_ends(Range tiles, const Sees &sees) {
#pragma unroll 1
    while (tiles.begin < tiles.end && !sees(tiles.begin)) ++tiles.begin;
#pragma unroll 1
    while (tiles.begin < tiles.end && !sees(tiles.end - 1)) --tiles.end;
    return tiles.begin < tiles.end ? tiles : Range{0, 0};
}

// Tiles of B_r queries that see some of `keys`, which exist, in any head.
template <typename Mod, int B_r>
FLASH_DEVICE Range trimmed_query_tiles(const ModOfLaunch<Mod> &mod, Range tiles, Range keys, int seq_len_q,
                                       int batch) {
    return without_empty_ends(tiles, [&](int tile) {
        return may_see(mod, batch, 0, {tile * B_r, min_of((tile + 1) * B_r, seq_len_q)}, keys);
    });
}

// Tiles of B_c keys of which some query of `rows`, which exist, sees some.
template <typename Mod, int B_c>
FLASH_DEVICE Range trimmed_key_tiles(const ModOfLaunch<Mod> &mod, Range tiles, Range rows, int seq_len_k,
                                     int batch, int head) {
    return without_empty_ends(tiles, [&](int tile) {
        return may_see(mod, batch, head, rows, {tile * B_c, min_of((tile + 1) * B_c, seq_len_k)});
    });
}

// Writes the bits, where the launch has room for them.
template <typename Mod>
cudaError_t launch_find_tiles(const BackwardProblem &problem, cudaStream_t stream) {
    if constexpr (reads_found_tiles<Mod>()) {
        const ModTiles &tiles = problem.mod->tiles;
        const int64_t n_rows = ceil_div(problem.seq_len_q, kFoundRows);
        const int64_t n_words = ceil_div(ceil_div(problem.seq_len_k, kFoundKeys), kTilesAWord);
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
        const auto kernel = reinterpret_cast<const void *>(&find_tiles_kernel<Mod, kFoundRows, kFoundKeys>);
        return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kFinderWarps * kWarpSize),
                                parameters, 0, stream);
    } else {
        return cudaSuccess;
    }
}

}  // namespace flash
