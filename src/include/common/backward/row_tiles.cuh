// The sums of dQ hold something of each tile of 16 query rows: where a sequence's tiles lie, and how many
// there are.
#pragma once

#include "backward.cuh"
#include "common/cuda_utils.cuh"
#include "common/fragments.cuh"
#include "common/sequence_rows.cuh"

namespace flash {

// Rows of a head, or of all heads' packed sequences, in tiles no two of which share a sequence. Kernels work
// out places for each tile that they visit: what takes a division is done before.
struct RowTiles {
    static constexpr int size = kMmaM;

    bool packed;
    int n_sequences;
    int64_t of_head;

    FLASH_HOST_DEVICE static constexpr RowTiles of_sequences(int n_sequences, int seq_len_q) {
        return {false, n_sequences, ceil_div(seq_len_q, size)};
    }
    FLASH_HOST_DEVICE static constexpr RowTiles of_packed(int n_sequences, int64_t total_q) {
        return {true, n_sequences, total_q / size + n_sequences};
    }

    // The first one of a sequence. kPacked: false where sequences are known not to be.
    template <bool kPacked = true>
    FLASH_HOST_DEVICE constexpr int64_t first(const SequenceRows &rows, int n_heads, int head,
                                              int sequence) const {
        if (kPacked && packed) return head * of_head + rows.first_row / size + sequence;
        return (int64_t(rows.batch) * n_heads + head) * of_head;
    }
    FLASH_HOST_DEVICE constexpr int64_t of_all_heads(int n_heads) const {
        return of_head * n_heads * (packed ? 1 : n_sequences);
    }
};

inline RowTiles row_tiles(const BackwardProblem &problem) {
    return problem.cu_seqlens_q != nullptr ? RowTiles::of_packed(problem.batch, problem.total_q)
                                           : RowTiles::of_sequences(problem.batch, problem.seq_len_q);
}

}  // namespace flash
