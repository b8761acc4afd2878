// Which element of a matrix which thread of a warp holds: the fragments of mma.sync.m16n8k16 and the
// rows that ldmatrix.x4 reads (PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix").
//
//   A (16 x 16), 4 registers of 2 elements     B (16 x 8), 2 registers     accumulator (16 x 8), 4 floats
//
//        k 0-7  k 8-15                              n 0-7                       n 0-7
//   m 0-7  a0     a2                          k 0-7   b0                  m 0-7   c0 c1
//   m 8-15 a1     a3                          k 8-15  b1                  m 8-15  c2 c3
//
// In each 8 x 8 square of A, lane l holds row l / 4, columns 2 (l % 4) and + 1; B has these squares
// transposed. Two neighbouring accumulators are therefore one A fragment: P needs no shuffle on its way
// from S = Q K^T to O += P V.
//
// ldmatrix.x4 fills four registers with four such squares; lanes 8 i … 8 i + 7 give the addresses of
// the 8 rows of square i. Squares are ordered so that the registers come out in the order mma reads:
//
//   Q as A:   rows are queries, 0 1 2 3 = a0 a1 a2 a3                            (16 queries x 16 of d_head)
//   K as B:   rows are keys, the n of S;  0 1 = b0 b1 of keys 0-7, 2 3 of 8-15   (16 keys x 16 of d_head)
//   V as B:   rows are keys, the k of O; transposed on loading;
//             0 1 = b0 b1 of columns 0-7, 2 3 of columns 8-15                    (16 keys x 16 of d_head)
#pragma once

#include "common/cuda_utils.cuh"

namespace flash {

inline constexpr int kMmaM = 16;
inline constexpr int kMmaN = 8;
inline constexpr int kMmaK = 16;
inline constexpr int kMmaTile = 16;  // rows and columns that one ldmatrix.x4 covers

struct MatrixCoordinate {
    int row;
    int column;

    constexpr bool operator==(const MatrixCoordinate &) const = default;
};

// The element of A (row: m, column: k) in half `half` (0: the lower 16 bits) of register `reg` (0 … 3).
FLASH_HOST_DEVICE constexpr MatrixCoordinate a_fragment(int lane, int reg, int half) {
    return {lane / 4 + 8 * (reg % 2), 2 * (lane % 4) + half + 8 * (reg / 2)};
}

// The element of B (row: k, column: n) in half `half` of register `reg` (0 or 1).
FLASH_HOST_DEVICE constexpr MatrixCoordinate b_fragment(int lane, int reg, int half) {
    return {2 * (lane % 4) + half + 8 * reg, lane / 4};
}

// The element of the accumulator (row: m, column: n) in float `i`: 0 … 3 of one mma. A wgmma is wider, and
// has four more floats for each 8 columns:
//
//            columns  0 1   2 3   4 5   6 7 | 8 9 ...
//     row 0   lane    0     1     2     3   |  0        i = 0, 1      | 4, 5
//     row 1   lane    4     5     6     7   |  4
//     row 8   lane    0     1     2     3   |  0        i = 2, 3      | 6, 7
FLASH_HOST_DEVICE constexpr MatrixCoordinate accumulator(int lane, int i) {
    return {lane / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * (lane % 4) + i % 2};
}

// The row of a 16 x 16 tile, and which of its two chunks, whose address a lane gives to ldmatrix.x4.
struct LdmatrixRow {
    int row;
    int chunk;
};

// For Q, and for V with .trans: squares go down first.
FLASH_HOST_DEVICE constexpr LdmatrixRow ldmatrix_row_QV(int lane) { return {lane % 16, lane / 16}; }

// For K: squares go to the right first.
FLASH_HOST_DEVICE constexpr LdmatrixRow ldmatrix_row_K(int lane) {
    return {lane % 8 + 8 * (lane / 16), lane / 8 % 2};
}

}  // namespace flash
