// sequence_rows.cuh: packed and padded sequences, key counts that are out of range, rows of the LSE.
#include <initializer_list>

#include "check.h"
#include "common/sequence_rows.cuh"

using namespace flash;

static bool is(const SequenceRows &rows, int batch, int first_row, int n_rows) {
    return rows.batch == batch && rows.first_row == first_row && rows.n_rows == n_rows;
}

static SequenceRows queries(const int *cu_seqlens, int longest, int b) {
    return sequence_rows(cu_seqlens, nullptr, longest, 1 << 30, b);
}

int main() {
    constexpr int all = 1 << 30;
    const int cu_seqlens[] = {0, 5, 5, 12, all};
    CHECK(is(queries(cu_seqlens, all, 0), 0, 0, 5));
    CHECK(is(queries(cu_seqlens, all, 1), 0, 5, 0));  // an empty sequence
    CHECK(is(queries(cu_seqlens, all, 2), 0, 5, 7));
    CHECK(is(queries(cu_seqlens, all, 3), 0, 12, all - 12));
    CHECK(is(queries(nullptr, 100, 2), 2, 0, 100));
    CHECK(is(queries(cu_seqlens, 7, 2), 0, 5, 7));
    CHECK(is(queries(cu_seqlens, 6, 2), 0, 5, 6));  // the workspaces' room, not the neighbour's

    const int seqused[] = {3, 2, 100, -1};
    CHECK(is(sequence_rows(nullptr, seqused, 64, 0, 0), 0, 0, 3));
    CHECK(is(sequence_rows(nullptr, seqused, 64, 0, 2), 2, 0, 64));
    CHECK(is(sequence_rows(nullptr, seqused, 64, 0, 3), 3, 0, 0));
    CHECK(is(sequence_rows(cu_seqlens, seqused, 64, 12, 0), 0, 0, 3));
    CHECK(is(sequence_rows(cu_seqlens, seqused, 64, 12, 1), 0, 5, 0));  // not the neighbour's rows
    CHECK(is(sequence_rows(cu_seqlens, seqused, 64, 12, 2), 0, 5, 7));

    // Whatever the device's numbers are, the rows are some of the tensor's.
    const int odd[] = {0, -5, -1, 1, 7, 99, 100, 101, 4096, INT32_MAX, INT32_MIN, INT32_MIN + 1};
    for (const int begin : odd) {
        for (const int end : odd) {
            for (const int used : odd) {
                for (const int total : {0, 1, 100, INT32_MAX}) {
                    for (const int longest : {1, 64, INT32_MAX}) {
                        const int offsets[] = {begin, end};
                        for (const int *counts : {static_cast<const int *>(nullptr), &used}) {
                            const SequenceRows rows = sequence_rows(offsets, counts, longest, total, 0);
                            CHECK(rows.batch == 0 && rows.first_row >= 0 && rows.n_rows >= 0);
                            CHECK(int64_t(rows.first_row) + rows.n_rows <= total);
                            CHECK(rows.n_rows <= longest);
                            CHECK(counts == nullptr || used < 0 || rows.n_rows <= used);
                        }
                    }
                }
            }
        }
    }
    const int before_the_tensor[] = {0, -5, 256};
    CHECK(is(sequence_rows(before_the_tensor, nullptr, 256, 256, 0), 0, 0, 0));
    CHECK(is(sequence_rows(before_the_tensor, nullptr, 256, 256, 1), 0, 0, 256));
    const int decreasing[] = {4, 1};
    CHECK(is(sequence_rows(decreasing, nullptr, 100, 100, 0), 0, 4, 0));
    CHECK(nameable_rows(100) == 100 && nameable_rows(INT32_MAX) == INT32_MAX);
    CHECK(nameable_rows(int64_t(1) << 31) == INT32_MAX);
    CHECK(row_offset(-1, 9) == 0 && row_offset(9, 9) == 9 && row_offset(10, 9) == 9);

    // (batch, n_heads, seq_len_q), and (n_heads, total_q), both beyond 32 bits.
    CHECK(lse_begin(false, {3, 0, 10}, 4, 1, 10, 0) == (3 * 4 + 1) * 10);
    CHECK(lse_begin(true, {0, 7, 10}, 4, 2, 10, 100) == 2 * 100 + 7);
    CHECK(lse_begin(false, {1 << 16, 0, 1}, 1 << 10, 5, 1 << 10, 0) == ((int64_t(1) << 26) + 5) << 10);
    CHECK(lse_begin(true, {0, 9, 1}, 64, 63, 1, int64_t(1) << 30) == (int64_t(63) << 30) + 9);
    // Packed keys count as sequences of one length.
    ForwardProblem problem{};
    problem.batch = 3;
    problem.seq_len_k = 100;
    CHECK(typical_keys(problem) == 100);
    const int ends[] = {0, 90, 90, 100};
    problem.cu_seqlens_k = ends;
    CHECK(typical_keys(problem) == 34);
    return report();
}
