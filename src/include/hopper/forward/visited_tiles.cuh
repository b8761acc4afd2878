// Which tiles of an item a mod's mask leaves something of: the load thread and the consumers go through the
// same ones, from the last to the first.
#pragma once

#include "common/mod_tiles.cuh"
#include "hopper/forward/kernel_args.cuh"
#include "hopper/forward/static_kernel_configuration.cuh"

namespace flash::hopper {

template <typename Kernel, typename Args>
FLASH_DEVICE auto visited_tiles_of(const Args &args, const WorkItem &item, int seq_len_q, int seq_len_k) {
    const int first_row = item.q_block * Kernel::B_r;
    return VisitedTiles<typename Kernel::Mod, Kernel::B_c>{args.mod.captured,
                                                           args.mod.tiles,
                                                           item.batch,
                                                           item.head,
                                                           item.q_block,
                                                           first_row,
                                                           min(first_row + Kernel::B_r, seq_len_q) - 1,
                                                           seq_len_k};
}

// The tile behind kv_block; first - 1: there is none. Under a window tile `first` is never left out: what
// hidden_values.cuh clears is in it.
template <typename Kernel, typename Tiles>
FLASH_DEVICE Visited next_tile(const Tiles &tiles, int kv_block, int first) {
    const Visited found = tiles.last_visited(kv_block - 1, first);
    if (Kernel::traits.window && found.kv_block < first && kv_block > first) {
        return {first, TileKind::PARTIAL};
    }
    return found;
}

}  // namespace flash::hopper
