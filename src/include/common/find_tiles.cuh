// Writes what a mod's mask leaves of each tile (ModTiles), by looking at its elements where bounds do not
// tell.
//
// A thread block finds one word, some tiles of one row of tiles; each of its warps takes some groups of rows
// of these, 32 columns at a time, and stops where one has turned out to be neither empty nor full.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/mod_tiles.cuh"
#include "common/ptx.cuh"

namespace flash {

inline constexpr int kFinderWarps = 4;
inline constexpr int kRowsAtATime = 8;  // between two votes
// On an SM, at least: if nothing is asked for, ptxas spills down to the next step of occupancy by itself.
inline constexpr int kFinderBlocks = 8;

template <typename Mod>
struct TileFinder {
    ModOfLaunch<Mod> mod;
    uint32_t *words;
    int seq_len_q, seq_len_k;
    int n_heads, n_row_tiles, n_words;  // 1 head where the mask does not depend on it

    // Of the rows first_q … end_q - 1, as far as they exist.
    template <int B_c>
    FLASH_DEVICE TileKind kind(int batch, int head, int first_q, int end_q, int kv_block) const {
        const int first_k = kv_block * B_c;
        end_q = min_of(end_q, seq_len_q);
        const int end_k = min_of(first_k + B_c, seq_len_k);
        if (first_q >= end_q || first_k >= end_k) return TileKind::EMPTY;
        if constexpr (Mod::kBoundsTell) {
            const TileKind told =
                tile_kind(Mod::tile(mod.captured, batch, head, first_q, end_q - 1, first_k, end_k - 1));
            if (told != TileKind::PARTIAL) return told;
        }
        const auto once = Mod::once(mod.captured);
        const auto of_head = Mod::head(mod.captured, once, batch, head);
        bool any = false, all = true;
#pragma unroll 1
        for (int first = first_k; first < end_k; first += kWarpSize) {
            const int key = min_of(first + int(threadIdx.x) % kWarpSize, end_k - 1);
            const auto column = Mod::column(mod.captured, once, of_head, batch, head, key);
#pragma unroll 1
            for (int q = first_q; q < end_q; q += kRowsAtATime) {
#pragma unroll 4  // whose loads are under way together
                for (int i = 0; i < kRowsAtATime; ++i) {
                    const int row = min_of(q + i, end_q - 1);
                    const auto of_row = Mod::row(mod.captured, once, of_head, batch, head, row);
                    const bool seen =
                        Mod::visible(mod.captured, once, of_head, of_row, column, 0.f, batch, head, row, key);
                    any = any || seen;
                    all = all && seen;
                }
                if (__any_sync(kAllLanes, any) && !__all_sync(kAllLanes, all)) return TileKind::PARTIAL;
            }
        }
        return __all_sync(kAllLanes, all) ? TileKind::FULL : TileKind::EMPTY;
    }
};

template <typename Mod, int B_r, int B_c, int kGroups>
__global__ void __launch_bounds__(kFinderWarps *kWarpSize, kFinderBlocks)
    find_tiles_kernel(const __grid_constant__ TileFinder<Mod> finder) {
    int block = blockIdx.x;
    const int word = block % finder.n_words;
    block /= finder.n_words;
    const int row_tile = block % finder.n_row_tiles;
    block /= finder.n_row_tiles;
    const int head = block % finder.n_heads, batch = block / finder.n_heads;
    using Word = TilesOfWord<kGroups>;
    constexpr int kKindsAWarp = kKindsAWord / kFinderWarps, kRows = B_r / kGroups;
    const int warp = threadIdx.x / kWarpSize;
    uint32_t bits = 0;
#pragma unroll 1
    for (int i = warp * kKindsAWarp; i < (warp + 1) * kKindsAWarp; ++i) {
        const int group = i % Word::kKinds, first_q = row_tile * B_r + group * kRows;
        const TileKind kind =
            finder.template kind<B_c>(batch, head, first_q, group < kGroups ? first_q + kRows : first_q,
                                      word * Word::kTiles + i / Word::kKinds);
        bits |= static_cast<uint32_t>(kind) << 2 * i;
    }
    __shared__ uint32_t parts[kFinderWarps];
    if (threadIdx.x % kWarpSize == 0) parts[warp] = bits;
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int i = 1; i < kFinderWarps; ++i) bits |= parts[i];
    const ModTiles &tiles = finder.mod.tiles;
    finder.words[batch * tiles.batch_stride + head * tiles.head_stride + row_tile * tiles.row_stride + word] =
        bits;
}

// Fills problem.mod->tiles, of which a batch item or a head has its own where there is a stride for it.
template <typename Kernel>
int find_tiles(const ForwardProblem &problem, void *stream) {
    using Mod = typename Kernel::Mod;
    if (problem.mod == nullptr || problem.mod->tiles.words == nullptr) return cudaErrorInvalidValue;
    const ModTiles &tiles = problem.mod->tiles;
    TileFinder<Mod> finder{
        mod_of_launch<Mod>(*problem.mod),
        const_cast<uint32_t *>(tiles.words),
        problem.seq_len_q,
        problem.seq_len_k,
        tiles.head_stride == 0 ? 1 : problem.n_heads,
        ceil_div(problem.seq_len_q, Kernel::B_r),
        ceil_div(ceil_div(problem.seq_len_k, Kernel::B_c), TilesOfWord<Kernel::mask_groups>::kTiles)};
    if (finder.n_words > tiles.row_stride) return cudaErrorInvalidValue;
    const int64_t blocks = int64_t(tiles.batch_stride == 0 ? 1 : problem.batch) * finder.n_heads *
                           finder.n_row_tiles * finder.n_words;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    void *parameters[] = {&finder};
    const cudaError_t error =
        cudaLaunchKernel(reinterpret_cast<const void *>(
                             &find_tiles_kernel<Mod, Kernel::B_r, Kernel::B_c, Kernel::mask_groups>),
                         dim3(static_cast<unsigned>(blocks)), dim3(kFinderWarps * kWarpSize), parameters, 0,
                         static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) cudaGetLastError();  // reported here: the next launch starts afresh
    return error;
}

// Of a kernel's record: nullptr where the mod has nothing to find.
template <typename Kernel>
constexpr auto tile_finder() -> int (*)(const ForwardProblem &, void *) {
    if constexpr (Kernel::mod_hides_keys) {
        if constexpr (!Kernel::Mod::kBoundsDecide) return &find_tiles<Kernel>;
    }
    return nullptr;
}

}  // namespace flash
