// Where the rows of one sequence lie, and how many there are, for sequences of different lengths.
//
//     cu_seqlens, packed     rows cu_seqlens[b] … cu_seqlens[b + 1] - 1 of one long tensor
//     none                   `seq_len` rows at place b of the batch
//
// and of the keys only the first seqused[b], where that is given.
#pragma once

#include "common/cuda_utils.cuh"
#include "flash_attention.cuh"

namespace flash {

struct SequenceRows {
    int batch;      // place in the batch dimension of the tensor
    int first_row;  // first row at that place
    int n_rows;
};

// `seqused`: of keys, or nullptr. A count beyond the sequence's own rows is cut down to them, so that
// no other sequence's rows are read; a negative one is 0.
FLASH_HOST_DEVICE constexpr SequenceRows sequence_rows(const int *cu_seqlens, const int *seqused, int seq_len,
                                                       int b) {
    SequenceRows rows{b, 0, seq_len};
    if (cu_seqlens != nullptr) rows = {0, cu_seqlens[b], max_of(0, cu_seqlens[b + 1] - cu_seqlens[b])};
    if (seqused != nullptr) rows.n_rows = max_of(0, min_of(rows.n_rows, seqused[b]));
    return rows;
}

// Of queries. `longest` of the call is what grid and workspaces have room for: a sequence with more, which
// only the device could know, is cut down to it, so that nothing is written behind the workspaces' ends.
FLASH_HOST_DEVICE constexpr SequenceRows sequence_queries(const int *cu_seqlens_q, int longest, int b) {
    SequenceRows rows = sequence_rows(cu_seqlens_q, nullptr, longest, b);
    rows.n_rows = min_of(rows.n_rows, longest);
    return rows;
}

// The keys of a sequence as launches take them to find an order of the work: packed sequences, of which only
// the device knows the lengths, are taken for equal ones.
inline int typical_keys(const ForwardProblem &problem) {
    return problem.cu_seqlens_k == nullptr ? problem.seq_len_k : ceil_div(problem.seq_len_k, problem.batch);
}

// The index in lse of a head's first row: (batch, n_heads, seq_len_q), or with packed queries
// (n_heads, total_q).
FLASH_HOST_DEVICE constexpr int64_t lse_begin(bool packed, const SequenceRows &rows, int n_heads, int head,
                                              int seq_len_q, int64_t total_q) {
    return packed ? head * total_q + rows.first_row : (int64_t(rows.batch) * n_heads + head) * seq_len_q;
}

}  // namespace flash
