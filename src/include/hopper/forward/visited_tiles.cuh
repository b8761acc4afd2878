// Which tiles of an item a mod's mask leaves something of, as the load thread finds them.
#pragma once

#include "common/mod_tiles.cuh"
#include "hopper/forward/kernel_args.cuh"
#include "hopper/forward/static_kernel_configuration.cuh"

namespace flash::hopper {

template <typename Kernel, typename Args>
FLASH_DEVICE auto visited_tiles_of(const Args &args, const WorkItem &item) {
    const int seq_len_q = Kernel::traits.varlen ? item.seq_len_q : args.work.seq_len_q;
    const int seq_len_k = Kernel::traits.varlen ? item.seq_len_k : args.work.seq_len_k;
    const int first_row = item.q_block * Kernel::B_r;
    return VisitedTiles<typename Kernel::Mod, Kernel::B_c, Kernel::mask_groups>{
        args.mod.captured,
        args.mod.tiles,
        item.batch,
        item.head,
        item.q_block,
        first_row,
        min(first_row + Kernel::B_r, seq_len_q) - 1,
        seq_len_k,
        kWarpgroupRows};
}

}  // namespace flash::hopper
