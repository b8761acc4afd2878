// Elements of a captured tensor for a warp's 16 x n scores, 16 bits each, row by row: a thread reads eight
// neighbouring keys of its two rows at once, and the four lanes of a row hand them to whom they belong.
//
//     read         lane q of the row's four: columns 8 q … 8 q + 7 of each 32, in four words
//     transposed   word i: columns 8 i + 2 q and + 1, as the accumulator has them (fragments.cuh)
//
// Columns behind the last 32 are read as they are needed, two at a time. Where a row does not lie as that
// needs it, its elements are read one by one; what is outside of the tensor is 0.
#pragma once

#include "common/cuda_utils.cuh"
#include "common/fragments.cuh"
#include "common/mod_values.cuh"
#include "common/ptx.cuh"
#include "common/quad.cuh"
#include "common/swizzling.cuh"

namespace flash {

template <typename Element, int kSquares>
struct StreamedRows {
    using Row = mods::RowOf<Element>;
    static_assert(sizeof(Element) == 2);
    static constexpr int kGroups = kSquares / 4;
    static constexpr int kKeys = kSquares * kMmaN;
    static constexpr int kRegisters = 2 * kSquares;

    uint32_t words[2][kSquares];

    // Whether a whole row of scores can be read at once.
    static FLASH_HOST_DEVICE bool lies_well(const Row &row, int64_t stride, int first_key) {
        const uintptr_t address = reinterpret_cast<uintptr_t>(row.data + first_key);
        return stride == 1 && address % 16 == 0 && first_key + kKeys <= row.size;
    }

    // `rows`: the thread's two. Their words may be on their way until `arrange`, which has to follow.
    FLASH_DEVICE void read(const Row (&rows)[2], int64_t stride, int first_key, int lane) {
        const int quad_lane = lane & 3;
        const bool well = lies_well(rows[0], stride, first_key) && lies_well(rows[1], stride, first_key);
        if (__all_sync(kAllLanes, well)) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const Element *const data = rows[r].data + first_key;
#pragma unroll
                for (int group = 0; group < kGroups; ++group) {
                    load_words<4>(&words[r][4 * group], data + 32 * group + 8 * quad_lane);
                }
#pragma unroll
                for (int n = 4 * kGroups; n < kSquares; ++n) {
                    load_words<1>(&words[r][n], data + 8 * n + 2 * quad_lane);
                }
            }
        } else {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
#pragma unroll
                for (int n = 0; n < kSquares; ++n) {
                    // Found out anew: else ptxas works out all places before the first is read.
                    const int key = computed_here(first_key) + column(n, quad_lane);
                    words[r][n] = pair(rows[r], stride, key);
                }
            }
        }
    }

    // Of a swizzled tile of kRows rows in shared memory, whose rows from `row` on are the warp's, from square
    // `first` of 8 columns on: arranged already. Lane 8 i + j addresses row j of matrix i: 0, 1 are rows 0-7
    // and 8-15 of a square, 2, 3 the same of the next one.
    // Gives a word that follows from all that was read.
    template <int kRows>
    FLASH_DEVICE uint32_t read_tile(uint32_t tile, int row, int first, int lane) {
        static_assert(kSquares % 2 == 0);
        uint32_t all = 0;
#pragma unroll
        for (int n = 0; n < kSquares; n += 2) {
            uint32_t squares[4];
            ldmatrix(squares, tile + chunk_offset(kRows, row + (lane & 15), first + n + (lane >> 4)));
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i % 2][n + i / 2] = squares[i];
            all ^= squares[0];
        }
        return all;
    }

    FLASH_DEVICE void arrange(int lane) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                transpose_quad(reinterpret_cast<uint32_t (&)[4]>(words[r][4 * group]), lane & 3);
            }
#pragma unroll
            for (uint32_t &word : words[r]) word = computed_here(word);  // not later
        }
    }

    // Has the second level cache fetch a warp's rows, one half by each lane: that which `row` finds.
    // `row(i)`: the warp's row i.
    template <typename FindRow>
    static FLASH_DEVICE void prefetch(const FindRow &find_row, int64_t stride, int first_key, int lane) {
        const Row row = find_row(lane >> 1);
        constexpr int kStep = 64;  // elements of 128 bytes
#pragma unroll
        for (int i = 0; i < kKeys; i += 2 * kStep) {
            const int key = first_key + i + (lane & 1) * kStep;
            if (stride == 1 && key < row.size && (kKeys % (2 * kStep) == 0 || key < first_key + kKeys)) {
                prefetch_L2(row.data + key);
            }
        }
    }

    // Of the thread's row r, square n, column c, once arranged.
    FLASH_DEVICE float value(int r, int n, int c) const {
        return mods::value_of(Element{static_cast<uint16_t>(words[r][n] >> 16 * c)});
    }

    // The first column of word n as it is read.
    static FLASH_HOST_DEVICE constexpr int column(int n, int quad_lane) {
        return n < 4 * kGroups ? n / 4 * 32 + 8 * quad_lane + 2 * (n % 4) : 8 * n + 2 * quad_lane;
    }

    static FLASH_HOST_DEVICE uint32_t pair(const Row &row, int64_t stride, int key) {
        uint32_t bits = 0;
        if (unsigned(key) < unsigned(row.size)) bits = row.data[key * stride].bits;
        if (unsigned(key + 1) < unsigned(row.size)) bits |= uint32_t(row.data[(key + 1) * stride].bits) << 16;
        return bits;
    }
};

// Of a mod that streams nothing.
struct NoStreamedRows {
    static constexpr int kRegisters = 0;
};

}  // namespace flash
