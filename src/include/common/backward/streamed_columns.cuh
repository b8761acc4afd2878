// Elements of a captured tensor for a warp's 16 x n scores whose rows are keys and whose columns are queries,
// 16 bits each. Rows of the tensor are columns here, as far apart as neighbouring queries' rows are:
//
//     read         the two words of a square of 8 queries: query lane / 4, keys 2 (lane % 4) and + 1, of keys
//                  0 … 7 and of keys 8 … 15
//     transposed   key lane / 4, queries 2 (lane % 4) and + 1, as the accumulator has them (fragments.cuh)
//
// Where the rows do not lie as that needs it, elements are read one by one; what is outside of the tensor is
// 0.
#pragma once

#include "common/cuda_utils.cuh"
#include "common/fragments.cuh"
#include "common/mod_values.cuh"
#include "common/ptx.cuh"
#include "common/streamed_rows.cuh"

namespace flash {

template <typename Element, int kSquares>
struct StreamedColumns {
    using Row = mods::RowOf<Element>;
    static_assert(sizeof(Element) == 2);
    static constexpr int kQueries = kSquares * kMmaN;
    static constexpr int kRegisters = 2 * kSquares;

    uint32_t words[2][kSquares];  // of keys 0 … 7 and 8 … 15

    // Whether a thread can read two keys of each query at once, 16 keys from `first_key` on. `first`, `last`:
    // rows of the first and of the last query, between which all lie within the tensor if these do.
    static FLASH_HOST_DEVICE bool lies_well(const Row &first, const Row &last, int64_t stride, int64_t step,
                                            int first_key) {
        const uintptr_t address = reinterpret_cast<uintptr_t>(first.data + first_key);
        return stride == 1 && address % 4 == 0 && step % 2 == 0 &&
               first_key + kMmaM <= min_of(first.size, last.size);
    }

    // `find_row(i)`: the row of the warp's query i; `step`: from one to the next. Words may be on their way
    // until `arrange`, which has to follow.
    template <typename FindRow>
    FLASH_DEVICE void read(const FindRow &find_row, int64_t stride, int64_t step, int first_key, int lane) {
        const Row first = find_row(0), last = find_row(kQueries - 1);
        const int row = lane >> 2, key = first_key + 2 * (lane & 3);
        if (__all_sync(kAllLanes, lies_well(first, last, stride, step, first_key))) {
            const Element *data = first.data + row * step + key;
#pragma unroll
            for (int n = 0; n < kSquares; ++n) {
                load_words<1>(&words[0][n], data);
                load_words<1>(&words[1][n], data + kMmaN);
                data += kMmaN * step;
            }
        } else {
            // In a loop, for want of registers: each square comes in at the end.
            forget();
#pragma unroll 1
            for (int n = 0; n < kSquares; ++n) {
                const Row own = find_row(row + n * kMmaN);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int i = 0; i + 1 < kSquares; ++i) words[half][i] = words[half][i + 1];
                    words[half][kSquares - 1] =
                        StreamedRows<Element, 1>::pair(own, stride, key + half * kMmaN);
                }
            }
        }
    }

    // Else the words of the block before would be kept, as what these might be.
    FLASH_DEVICE void forget() {
#pragma unroll
        for (auto &of_keys : words) {
#pragma unroll
            for (uint32_t &word : of_keys) word = 0;
        }
    }

    FLASH_DEVICE void arrange() {
#pragma unroll
        for (auto &of_keys : words) {
#pragma unroll
            for (uint32_t &word : of_keys) word = transpose_square(word);
        }
    }

    // Has the second level cache fetch the rows, one by each lane, with the keys of the warps beside this
    // one.
    template <typename FindRow>
    static FLASH_DEVICE void prefetch(const FindRow &find_row, int64_t stride, int first_key, int first,
                                      int count, int lane) {
        if (lane >= count) return;
        const Row row = find_row(first + lane);
        if (stride == 1 && first_key < row.size) prefetch_L2(row.data + first_key);
    }

    // Of the thread's row r, square n, column c, once arranged.
    FLASH_DEVICE float value(int r, int n, int c) const {
        return mods::value_of(Element{static_cast<uint16_t>(words[r][n] >> 16 * c)});
    }
};

}  // namespace flash
