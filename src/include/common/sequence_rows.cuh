// Where the rows of one sequence lie, and how many there are, for sequences of different lengths.
//
//     cu_seqlens, packed     rows cu_seqlens[b] … cu_seqlens[b + 1] - 1 of one long tensor
//     none                   `longest` rows at place b of the batch
//
// and of the keys only the first seqused[b], where that is given. These numbers lie on the device, where
// nobody has looked at them. Whatever they are, the rows that are named here are rows of the tensor: all who
// read or write by such numbers come through this file.
#pragma once

#include "common/cuda_utils.cuh"
#include "flash_attention.cuh"

namespace flash {

struct SequenceRows {
    int batch;      // place in the batch dimension of the tensor
    int first_row;  // first row at that place
    int n_rows;
};

// The rows of a packed tensor that offsets of 32 bits can name.
FLASH_HOST_DEVICE constexpr int nameable_rows(int64_t total) {
    return total < INT32_MAX ? static_cast<int>(total) : INT32_MAX;
}

// An offset as a number of rows that the tensor has: 0 … n_rows.
FLASH_HOST_DEVICE constexpr int row_offset(int offset, int n_rows) {
    return max_of(0, min_of(offset, n_rows));
}

// The same of a packed sequence, and of one of which so many rows are used, as words that have been read.
FLASH_HOST_DEVICE constexpr SequenceRows packed_rows(int begin, int end, int longest, int total) {
    const int first = row_offset(begin, total);
    return {0, first, max_of(0, min_of(row_offset(end, total) - first, longest))};
}
FLASH_HOST_DEVICE constexpr int used_rows(int n_rows, int used) { return max_of(0, min_of(n_rows, used)); }

// `total`: nameable_rows of the packed tensor. `longest`: of a sequence; grid, workspaces and tensor maps
// have room for so many, and one with more is cut down to them. `seqused`: of keys, or nullptr; a count
// beyond the sequence's own rows is cut down to them, so that no other sequence's rows are read. What is
// negative is 0.
FLASH_HOST_DEVICE constexpr SequenceRows sequence_rows(const int *cu_seqlens, const int *seqused, int longest,
                                                       int total, int b) {
    SequenceRows rows{b, 0, longest};
    if (cu_seqlens != nullptr) rows = packed_rows(cu_seqlens[b], cu_seqlens[b + 1], longest, total);
    if (seqused != nullptr) rows.n_rows = used_rows(rows.n_rows, seqused[b]);
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
