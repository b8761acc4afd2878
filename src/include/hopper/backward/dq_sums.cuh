// The order of dq_sums, the float32 sums of dQ.
//
//     dq_sums[tile][part][chunk][thread][4]     tile: B_r query rows of one head; part: a consumer
//     warpgroup's
//
// Each thread of a warpgroup has 32 accumulators of its part, (64, 64): chunk c holds its accumulators
// 4 c ... 4 c + 3. So whatever leaves registers stands next to what the neighbour leaves, 16 bytes each.
//
// Packed sequences begin at tiles of their own: sequence b at tile first_row / B_r + b. The tiles of one do
// not reach into those of the next, and rows / B_r + batch are enough for all.
#pragma once

#include "common/cuda_utils.cuh"

namespace flash::hopper {

FLASH_HOST_DEVICE constexpr int first_packed_dq_tile(int first_row, int B_r, int sequence) {
    return first_row / B_r + sequence;
}

// Tiles of one head: of all packed sequences, or of one sequence.
FLASH_HOST_DEVICE constexpr int64_t dq_tiles_of_head(bool packed, int64_t total_q, int seq_len_q, int B_r,
                                                     int batch) {
    return packed ? total_q / B_r + batch : ceil_div(seq_len_q, B_r);
}

}  // namespace flash::hopper
