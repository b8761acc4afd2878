// sequence_rows.cuh: packed and padded sequences, key counts that are out of range, rows of the LSE.
#include "check.h"
#include "common/sequence_rows.cuh"

using namespace flash;

static bool is(const SequenceRows &rows, int batch, int first_row, int n_rows) {
    return rows.batch == batch && rows.first_row == first_row && rows.n_rows == n_rows;
}

int main() {
    const int cu_seqlens[] = {0, 5, 5, 12, 1 << 30};
    CHECK(is(sequence_rows(cu_seqlens, nullptr, 100, 0), 0, 0, 5));
    CHECK(is(sequence_rows(cu_seqlens, nullptr, 100, 1), 0, 5, 0));  // an empty sequence
    CHECK(is(sequence_rows(cu_seqlens, nullptr, 100, 2), 0, 5, 7));
    CHECK(is(sequence_rows(cu_seqlens, nullptr, 100, 3), 0, 12, (1 << 30) - 12));
    CHECK(is(sequence_rows(nullptr, nullptr, 100, 2), 2, 0, 100));

    CHECK(is(sequence_queries(cu_seqlens, 7, 2), 0, 5, 7));
    CHECK(is(sequence_queries(cu_seqlens, 6, 2), 0, 5, 6));  // the workspaces' room, not the neighbour's
    CHECK(is(sequence_queries(nullptr, 100, 2), 2, 0, 100));

    const int decreasing[] = {4, 1};  // refused before a launch; here it must not become a negative length
    CHECK(is(sequence_rows(decreasing, nullptr, 100, 0), 0, 4, 0));

    const int seqused[] = {3, 2, 100, -1};
    CHECK(is(sequence_rows(nullptr, seqused, 64, 0), 0, 0, 3));
    CHECK(is(sequence_rows(nullptr, seqused, 64, 2), 2, 0, 64));
    CHECK(is(sequence_rows(nullptr, seqused, 64, 3), 3, 0, 0));
    CHECK(is(sequence_rows(cu_seqlens, seqused, 64, 0), 0, 0, 3));
    CHECK(is(sequence_rows(cu_seqlens, seqused, 64, 1), 0, 5, 0));  // not the neighbour's rows
    CHECK(is(sequence_rows(cu_seqlens, seqused, 64, 2), 0, 5, 7));

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
