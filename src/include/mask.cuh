// Which keys a query sees, and what follows from it for whole tiles.
//
// Causal masks are aligned bottom-right: query i sees key j when j <= i + (seq_len_k - seq_len_q).
// So every row sees keys 0 … visible_end - 1, and of the K/V blocks of B_c keys that a Q block visits
//
//     blocks 0 … n_full - 1                every query of the Q block sees every key: no mask is applied
//     blocks n_full … n_visible - 1        some query does not see some key (the diagonal, the last keys)
//     all others                           nobody sees anything: not visited
#pragma once

#include "cuda_utils.cuh"
#include "flash_attention.cuh"

namespace flash {

template <ForwardTraits TRAITS>
struct Mask {
    int seq_len_q;
    int seq_len_k;

    // One past the last key that query `row` sees; 0 if it sees none.
    FLASH_HOST_DEVICE constexpr int visible_end(int row) const {
        if constexpr (TRAITS.causal) {
            return max_of(0, min_of(seq_len_k, row + 1 + (seq_len_k - seq_len_q)));
        } else {
            return seq_len_k;
        }
    }

    // K/V blocks of B_c keys that queries up to `last_row` visit.
    FLASH_HOST_DEVICE constexpr int n_visible_blocks(int last_row, int B_c) const {
        return ceil_div(visible_end(last_row), B_c);
    }

    // K/V blocks of B_c keys that queries from `first_row` on see whole.
    FLASH_HOST_DEVICE constexpr int n_full_blocks(int first_row, int B_c) const {
        return visible_end(first_row) / B_c;
    }
};

}  // namespace flash
