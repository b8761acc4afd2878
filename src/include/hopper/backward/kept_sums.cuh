// Sums of dQ that a block keeps to itself (keeps_dq): it takes all tiles of keys of a head, one after the
// other, so that a query block gets its parts in this order.
//
//     the first part    is stored: nothing is cleared before
//     those between     are added, by bulk reductions
//     the last one      stays with the consumers, who begin its product with the sum, and round the result
//
// They lie as the consumers stage them, in the accumulators' order:
//
//     dq_sums[thread block][query head of the group][query block][part][warp][tile of 8 columns][lane][4]
//
// and a block uses the same memory for each of its heads, so that it stays in the L2 cache.
#pragma once

#include "hopper/backward/key_items.cuh"

namespace flash::hopper {

// Which part of its sum a tile of keys gives a query block that it visits.
struct PartOfSum {
    bool first, last;
};

template <typename Kernel>
FLASH_DEVICE PartOfSum part_of_sum(const BackwardKernelArgs &args, const BackwardItem &item, int q_block) {
    const Range keys = args.visible<Kernel::traits>(item.seq_len_q, item.seq_len_k)
                           .keys_of_rows({q_block * Kernel::B_r, q_block * Kernel::B_r + Kernel::B_r});
    return {item.tile == keys.begin / Kernel::B_c, item.tile == (keys.end - 1) / Kernel::B_c};
}

// The first tile of dq_sums of the item's first query head.
template <typename Kernel>
FLASH_DEVICE int first_dq_tile(const BackwardKernelArgs &args, const BackwardItem &item) {
    if constexpr (Kernel::keeps_dq) return blockIdx.x * args.group * args.dq_tiles;
    return item.head * args.group * args.dq_tiles + item.first_dq_tile;
}

// `tile`: a query block's, of a thread block.
template <typename Kernel>
FLASH_DEVICE float *kept_sums(const BackwardKernelArgs &args, int tile, int part) {
    return args.dq_sums + (int64_t{tile} * Kernel::n_consumers + part) * Kernel::dq_part_floats;
}

// What a consumer thread has to know of a query block until its dQ has left.
struct KeptPart {
    int tile;              // of dq_sums
    bool continues, last;  // continues: the last one of several
    uint16_t *gmem;        // last: of dQ, the thread's first column of its first row
    int n_rows;            // that exist from this row on
};

}  // namespace flash::hopper
