// Masks on a tile of scores, or of probabilities. A thread's elements of one row are in column order, so
// "keep these columns" is "keep these elements, from one number to another": a word of keep bits, whose tests
// the compiler turns into a few predicate loads (R2P) instead of one comparison an element.
#pragma once

#include <cmath>
#include <type_traits>

#include "hopper/layout.cuh"
#include "hopper/ptx_sm90.cuh"

namespace flash::hopper {

// Keep bits of elements 32 word ... 32 word + 31: those below `n_elements` are 1.
FLASH_DEVICE uint32_t keep_bits(int word, int n_elements) {
    return shift_right_clamped(0xffffffffu, max(32 * (word + 1) - n_elements, 0));
}

// (64, B_c): `hidden` in the thread's row r (0 or 1) where the column is n_columns or more; with kBegin also
// where it is below first_column. -inf hides scores, 0 probabilities.
template <int B_c, bool kBegin = false>
FLASH_DEVICE void keep_columns(float (&rmem_S)[B_c / 2], int r, int lane, int n_columns, int first_column = 0,
                               float hidden = -INFINITY) {
    constexpr int kElements = B_c / 4;  // of one row
    const int kept = kept_elements(lane, n_columns);
    const int left_out = kBegin ? kept_elements(lane, first_column) : 0;
#pragma unroll
    for (int word = 0; word < (kElements + 31) / 32; ++word) {
        uint32_t keep = keep_bits(word, kept);
        if (kBegin) keep &= ~keep_bits(word, left_out);
#pragma unroll
        for (int bit = 0; bit < 32 && word * 32 + bit < kElements; ++bit) {
            float &s = rmem_S[row_element_index(r, word * 32 + bit)];
            s = (keep & (1u << bit)) ? s : hidden;
        }
    }
}

// (64, n): `hidden` where a mask of the user's hides a score. `seen(column)`: whether the thread's rows 0 and
// 1 see a column, in bits 0 and 1. So many squares of 8 columns are looked at at a time: their loads are
// under way together, and all that is held from one time to the next is a bit a score. `all`: nothing is
// asked, all of it is hidden.
template <int n, int kMostAtATime, typename Seen>
FLASH_DEVICE void hide_by_loads(float (&rmem_S)[n / 2], int lane, bool all, const Seen &seen, float hidden) {
    constexpr int kSquares = n / 8, kSquaresOfWord = 16;
    constexpr int kSquaresAtATime = kSquares % kMostAtATime == 0 ? kMostAtATime : 2;
    static_assert(kSquares % kSquaresAtATime == 0);
#pragma unroll
    for (int first = 0; first < kSquares; first += kSquaresOfWord) {
        const int squares = min_of(kSquares - first, kSquaresOfWord);
        uint32_t keep[2] = {0, 0};  // of a row each, in the order of columns
#pragma unroll 1
        for (int square = all ? squares : 0; square < squares; square += kSquaresAtATime) {
            const int column = (first + square) * 8 + accumulator(lane, 0).column;
            uint32_t part[2] = {0, 0};
#pragma unroll
            for (int e = 0; e < 2 * kSquaresAtATime; ++e) {
                const uint32_t bits = seen(column + e / 2 * 8 + e % 2);
                part[0] |= (bits & 1) << e;
                part[1] |= (bits >> 1) << e;
            }
            keep[0] |= part[0] << 2 * square;
            keep[1] |= part[1] << 2 * square;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int e = 0; e < 2 * squares; ++e) {
                float &s = rmem_S[row_element_index(r, 2 * first + e)];
                s = (keep[r] & (1u << e)) ? s : hidden;
            }
        }
    }
}

// Whether what a mask of the user's needs of a column is loaded by one lane and handed to others: else each
// of eight lanes loads it, and a thread waits for memory several times.
template <typename Value>
inline constexpr bool is_shared = !std::is_empty_v<Value> && std::is_trivially_copyable_v<Value> &&
                                  (sizeof(Value) == 4 || sizeof(Value) == 8);

template <typename Value>
FLASH_DEVICE Value value_of_lane(const Value &value, int lane) {
    Value made = value;
    int words[sizeof(Value) / 4];
    __builtin_memcpy(words, &value, sizeof(Value));
#pragma unroll
    for (int i = 0; i < int(sizeof(Value)) / 4; ++i) words[i] = __shfl_sync(kAllLanes, words[i], lane);
    __builtin_memcpy(&made, words, sizeof(Value));
    return made;
}

// (64, n): `hidden` where a mask of the user's hides a score. `load(column)`: what the mask needs of a
// column; `seen(that, column)`: whether the thread's rows 0 and 1 see it, in bits 0 and 1. `all`: all of it
// is hidden. Called by whole warps.
template <int n, int kMostAtATime, typename Load, typename Seen>
FLASH_DEVICE void hide_unseen(float (&rmem_S)[n / 2], int lane, bool all, const Load &load, const Seen &seen,
                              float hidden = -INFINITY) {
    using Value = decltype(load(0));
    if constexpr (is_shared<Value>) {
        constexpr int kColumns = 32;  // of which each lane loads one
        Value own[ceil_div(n, kColumns)];
#pragma unroll
        for (int i = 0; i < ceil_div(n, kColumns); ++i) own[i] = load(kColumns * i + lane);
#pragma unroll
        for (int i = 0; i < ceil_div(n, kColumns); ++i) {
            const int first = kColumns * i;
            uint32_t keep[2] = {0, 0};
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                if (first + 4 * e >= n) break;
                const int column = e / 2 * 8 + e % 2 + accumulator(lane, 0).column;
                const uint32_t bits = seen(value_of_lane(own[i], column), first + column);
                keep[0] |= (bits & 1) << e;
                keep[1] |= (bits >> 1) << e;
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (all) keep[r] = 0;
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    if (first + 4 * e >= n) break;
                    float &s = rmem_S[row_element_index(r, 8 * i + e)];
                    s = (keep[r] & (1u << e)) ? s : hidden;
                }
            }
        }
    } else {
        hide_by_loads<n, kMostAtATime>(
            rmem_S, lane, all, [&](int column) { return seen(load(column), column); }, hidden);
    }
}

}  // namespace flash::hopper
