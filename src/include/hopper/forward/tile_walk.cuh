// In which order a consumer warpgroup takes the tiles of an item behind the first, and which of them need a
// mask: the loops over what tile_range.cuh says.
#pragma once

#include "hopper/forward/tile_range.cuh"

namespace flash::hopper {

// The tiles behind the first of an item, or of a chunk of its keys. Every row sees every key of most of them,
// which take `step`; those of which a mask hides something take `masked_step`.
template <typename Kernel, typename Walker, typename MaskedStep, typename Step>
FLASH_DEVICE void tiles_of_chunk(Walker &wg, const MaskedStep &masked_step, const Step &step) {
    wg.go_to_next_tile();
    if constexpr (Kernel::masks_diagonal) {
        const int last_masked = wg.last_masked_block();
#pragma unroll 1
        for (; wg.kv_block >= last_masked; wg.go_to_next_tile()) masked_step();
    }
    const int first_whole = wg.first_whole_block();
#pragma unroll 1
    for (; wg.kv_block >= first_whole; wg.go_to_next_tile()) step();
    if constexpr (Kernel::traits.window) {
#pragma unroll 1
        for (; wg.kv_block >= wg.end_of_loops(); wg.go_to_next_tile()) masked_step();
    }
}

// The tiles of an item behind the first. With chunks of keys (common/chunks.cuh) the loops go from the first
// tile of a chunk to its last, and `next_chunk` takes the first of the next.
template <typename Kernel, typename Walker, typename MaskedStep, typename Step, typename NextChunk>
FLASH_DEVICE void further_tiles(Walker &wg, const MaskedStep &masked_step, const Step &step,
                                const NextChunk &next_chunk) {
#pragma unroll 1
    for (;; next_chunk()) {
        tiles_of_chunk<Kernel>(wg, masked_step, step);
        if (Kernel::chunk_tiles == 0 || wg.kv_block < wg.last_block()) return;
    }
}

}  // namespace flash::hopper
