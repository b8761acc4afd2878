// Workspaces that hold something of each tile of query rows: where a sequence's tiles lie, and how many there
// are.
#pragma once

#include "backward.cuh"
#include "common/cuda_utils.cuh"
#include "common/sequence_rows.cuh"

namespace flash {

// Rows of a head, or of all heads' packed sequences, in tiles of `size` rows, no two of which share a
// sequence.
struct RowTiles {
    int size;
    bool packed;
    int seq_len_q, n_sequences;
    int64_t total_q;

    FLASH_HOST_DEVICE constexpr int64_t of_head() const {
        return packed ? total_q / size + n_sequences : ceil_div(seq_len_q, size);
    }
    // The first one of a sequence.
    FLASH_HOST_DEVICE constexpr int64_t first(const SequenceRows &rows, int n_heads, int head,
                                              int sequence) const {
        if (packed) return head * of_head() + rows.first_row / size + sequence;
        return (int64_t(rows.batch) * n_heads + head) * of_head();
    }
    FLASH_HOST_DEVICE constexpr int64_t of_all_heads(int n_heads) const {
        return of_head() * n_heads * (packed ? 1 : n_sequences);
    }
};

inline RowTiles row_tiles(const BackwardProblem &problem, int size) {
    return {size, problem.cu_seqlens_q != nullptr, problem.seq_len_q, problem.batch, problem.total_q};
}

}  // namespace flash
