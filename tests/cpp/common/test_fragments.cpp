// fragments.cuh, against the PTX ISA: the tables of mma.m16n8k16 (section "Matrix Fragments for
// mma.m16n8k16 with floating point type") written as there, and ldmatrix carried out on the host.
#include <array>

#include "check.h"
#include "common/fragments.cuh"

using namespace flash;

// The ISA's formulas: groupID = lane / 4, threadID_in_group = lane % 4; ai with i = 2 * register + half.
static void check_against_isa() {
    for (int lane = 0; lane < kWarpSize; ++lane) {
        const int group = lane >> 2;
        const int thread = lane & 3;
        for (int i = 0; i < 8; ++i) {
            const int row = (i < 2 || (4 <= i && i < 6)) ? group : group + 8;
            const int column = i < 4 ? thread * 2 + (i & 1) : thread * 2 + (i & 1) + 8;
            CHECK((a_fragment(lane, i / 2, i % 2) == MatrixCoordinate{row, column}));
        }
        for (int i = 0; i < 4; ++i) {
            const int row = i < 2 ? thread * 2 + (i & 1) : thread * 2 + (i & 1) + 8;
            CHECK((b_fragment(lane, i / 2, i % 2) == MatrixCoordinate{row, group}));
        }
        for (int i = 0; i < 4; ++i) {
            const int row = i < 2 ? group : group + 8;
            CHECK((accumulator(lane, i) == MatrixCoordinate{row, thread * 2 + (i & 1)}));
        }
    }
}

// ldmatrix.x4 on a 16 x 16 tile whose elements are their coordinates: what each register half of each
// lane holds. Lane l of register i gets elements 2 (l % 4) and + 1 of the row that lane 8 i + l / 4
// gave the address of; with .trans, elements l / 4 of rows 2 (l % 4) and + 1.
static MatrixCoordinate ldmatrix_result(LdmatrixRow (*lane_row)(int), bool transposed, int lane, int reg,
                                        int half) {
    const int row_in_square = transposed ? 2 * (lane % 4) + half : lane / 4;
    const int element = transposed ? lane / 4 : 2 * (lane % 4) + half;
    const LdmatrixRow at = lane_row(8 * reg + row_in_square);
    return {at.row, at.chunk * kChunkElements + element};
}

static void check_ldmatrix() {
    for (int lane = 0; lane < kWarpSize; ++lane) {
        for (int reg = 0; reg < 4; ++reg) {
            for (int half = 0; half < 2; ++half) {
                const MatrixCoordinate q = ldmatrix_result(ldmatrix_row_QV, false, lane, reg, half);
                CHECK(q == a_fragment(lane, reg, half));

                // K holds (key, d), B is (k = d, n = key); registers 2 and 3 are keys 8 … 15.
                const MatrixCoordinate k = ldmatrix_result(ldmatrix_row_K, false, lane, reg, half);
                const MatrixCoordinate b_k = b_fragment(lane, reg % 2, half);
                CHECK((k == MatrixCoordinate{b_k.column + 8 * (reg / 2), b_k.row}));

                // V holds (key, d), B is (k = key, n = d); registers 2 and 3 are columns 8 … 15.
                const MatrixCoordinate v = ldmatrix_result(ldmatrix_row_QV, true, lane, reg, half);
                const MatrixCoordinate b_v = b_fragment(lane, reg % 2, half);
                CHECK((v == MatrixCoordinate{b_v.row, b_v.column + 8 * (reg / 2)}));
            }
        }
    }
}

// P: register i of an A fragment is made of accumulators 2 (i % 2) and + 1 of 8-column tile i / 2.
static void check_accumulators_are_an_operand() {
    for (int lane = 0; lane < kWarpSize; ++lane) {
        for (int reg = 0; reg < 4; ++reg) {
            for (int half = 0; half < 2; ++half) {
                MatrixCoordinate s = accumulator(lane, 2 * (reg % 2) + half);
                s.column += kMmaN * (reg / 2);
                CHECK(s == a_fragment(lane, reg, half));
            }
        }
    }
}

// Each element of a matrix is held exactly once.
static void check_complete() {
    std::array<int, 256> a{};
    std::array<int, 128> b{}, c{};
    for (int lane = 0; lane < kWarpSize; ++lane) {
        for (int i = 0; i < 8; ++i) {
            const MatrixCoordinate at = a_fragment(lane, i / 2, i % 2);
            ++a[at.row * 16 + at.column];
        }
        for (int i = 0; i < 4; ++i) {
            const MatrixCoordinate at_b = b_fragment(lane, i / 2, i % 2);
            ++b[at_b.row * 8 + at_b.column];
            const MatrixCoordinate at_c = accumulator(lane, i);
            ++c[at_c.row * 8 + at_c.column];
        }
    }
    for (const int n : a) CHECK(n == 1);
    for (const int n : b) CHECK(n == 1);
    for (const int n : c) CHECK(n == 1);
}

int main() {
    check_against_isa();
    check_ldmatrix();
    check_accumulators_are_an_operand();
    check_complete();
    return report();
}
