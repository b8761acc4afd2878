// Masks on a tile of scores. A thread's elements of one row are in column order, so "keep the columns below
// n" is "keep the first so many elements": a word of keep bits, whose tests the compiler turns into a few
// predicate loads (R2P) instead of one comparison an element.
#pragma once

#include <cmath>

#include "hopper/layout.cuh"
#include "hopper/ptx.cuh"

namespace flash::hopper {

// S (64, B_c): -inf where the column is n_columns or more, in the thread's row r (0 or 1).
template <int B_c>
FLASH_DEVICE void keep_columns_below(float (&rmem_S)[B_c / 2], int r, int lane, int n_columns) {
    constexpr int kElements = B_c / 4;  // of one row
    const int kept = kept_elements(lane, n_columns);
#pragma unroll
    for (int word = 0; word < (kElements + 31) / 32; ++word) {
        const uint32_t keep = shift_right_clamped(0xffffffffu, max(32 * (word + 1) - kept, 0));
#pragma unroll
        for (int bit = 0; bit < 32 && word * 32 + bit < kElements; ++bit) {
            float &s = rmem_S[row_element_index(r, word * 32 + bit)];
            s = (keep & (1u << bit)) ? s : -INFINITY;
        }
    }
}

}  // namespace flash::hopper
