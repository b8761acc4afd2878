// Which (batch, head, Q block) a thread block works on, from its index in the one-dimensional grid.
//
// Without a causal mask the Q blocks of a head follow each other: its K and V are in L2 while they run.
// With one, the work grows with the Q block's number. The hardware hands out blocks in the order of
// their index, so the longest come first and the short ones fill the gaps at the end. To keep K and V
// in L2 nevertheless, this is done within sections of a few heads:
//
//     section 0: Q block n-1 of heads 0 … s-1, Q block n-2 of heads 0 … s-1, …, then section 1: …
//
// This is the order of tma/work_items.cuh too. Its arithmetic stands here once more: one function for both
// makes other machine code in either family. A test compares them.
#pragma once

#include "common/cuda_utils.cuh"

namespace flash::ampere {

struct BlockCoordinates {
    int batch;
    int head;
    int q_block;
};

struct GridShape {
    int n_q_blocks;     // of one head
    int n_heads;        // query heads of one batch entry
    int total_heads;    // batch * n_heads
    int section_heads;  // 1 … total_heads

    // `index`: 0 … n_q_blocks * total_heads - 1, at most 2^31 - 1 blocks; nothing here overflows.
    template <bool kLongestFirst>
    FLASH_HOST_DEVICE constexpr BlockCoordinates decode(int index) const {
        int q_block = 0;
        int batch_head = 0;
        if constexpr (kLongestFirst) {
            const int section = index / (n_q_blocks * section_heads);
            const int first_head = section * section_heads;
            const int heads = min_of(section_heads, total_heads - first_head);
            const int in_section = index - first_head * n_q_blocks;
            q_block = n_q_blocks - 1 - in_section / heads;
            batch_head = first_head + in_section % heads;
        } else {
            batch_head = index / n_q_blocks;
            q_block = index % n_q_blocks;
        }
        return {batch_head / n_heads, batch_head % n_heads, q_block};
    }
};

// Heads of a section. Their K and V, `kv_bytes_per_head` bytes each, share about 32 MiB of L2. A section has
// at least 32 heads, so that one of short sequences still fills the GPU. (H100, d_head 128: 32 heads at 1k
// keys, 16 or more at 4k, 4 to 16 at 16k are within 2 % of each other; 8 heads at 1k cost 4 %.)
FLASH_HOST_DEVICE constexpr int section_width(int64_t kv_bytes_per_head, int total_heads) {
    constexpr int64_t l2_bytes = int64_t(32) << 20;
    const int64_t heads = kv_bytes_per_head > 0 ? l2_bytes / kv_bytes_per_head : total_heads;
    return min_of(total_heads, heads < 32 ? 32 : heads > total_heads ? total_heads : int(heads));
}

}  // namespace flash::ampere
