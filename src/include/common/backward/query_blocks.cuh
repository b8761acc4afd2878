// Which queries see a key, and what follows from it for whole tiles: mask.cuh, seen from the keys.
//
// Query i stands at key p = i + (seq_len_k - seq_len_q) and sees the keys p - left ... p + right, limits of
// either sign. So key j is seen by the queries j - offset - right ... j - offset + left. Both bounds grow
// with j by 1 a key: a tile of keys is seen by queries of one range, of which the first and the last blocks
// need a mask.
#pragma once

#include "common/mask.cuh"

namespace flash {

// No limit. Sums of two limits and a position fit 32 bits.
inline constexpr int kNoLimit = (1 << 30) - 1;

struct QueryBlocks {
    int begin, end;  // blocks that the tile visits

    FLASH_HOST_DEVICE constexpr int count() const { return end - begin; }
};

struct VisibleQueries {
    int seq_len_q, seq_len_k;  // keys from seq_len_k on do not exist
    int left, right;           // kNoLimit: none

    // The first query that sees key `key`, if any does.
    FLASH_HOST_DEVICE constexpr int begin(int key) const { return max_of(0, first(key)); }

    // One past the last of them; no more than begin(key) if there is none.
    FLASH_HOST_DEVICE constexpr int end(int key) const {
        return key < seq_len_k ? min_of(seq_len_q, last(key) + 1) : 0;
    }

    // Query blocks of B_r rows that keys first_key ... first_key + B_c - 1 visit.
    FLASH_HOST_DEVICE constexpr QueryBlocks query_blocks(int first_key, int B_c, int B_r) const {
        const int n_keys = min_of(B_c, seq_len_k - first_key);
        if (n_keys <= 0) return {0, 0};
        const int begin_row = begin(first_key), end_row = end(first_key + n_keys - 1);
        if (begin_row >= end_row) return {0, 0};
        return {begin_row / B_r, ceil_div(end_row, B_r)};
    }

    // Whether some of the B_r queries from first_row on does not see some of the n_keys keys from first_key
    // on. Queries past the sequence's end do not count.
    FLASH_HOST_DEVICE constexpr bool hides_some(int first_row, int B_r, int first_key, int n_keys) const {
        return first_key + n_keys > seq_len_k || first_row < first(first_key + n_keys - 1) ||
               first_row + B_r - 1 > last(first_key);
    }

    // Bounds without regard to where the sequence begins and ends.
    FLASH_HOST_DEVICE constexpr int first(int key) const { return key - offset() - right; }
    FLASH_HOST_DEVICE constexpr int last(int key) const { return key - offset() + left; }

  private:
    FLASH_HOST_DEVICE constexpr int offset() const { return seq_len_k - seq_len_q; }
};

// Of a kernel with these traits: what a trait leaves out is no limit, at compile time.
template <BackwardTraits TRAITS>
FLASH_HOST_DEVICE constexpr VisibleQueries visible_queries(int seq_len_q, int seq_len_k, int window_left,
                                                           int window_right) {
    const int right = TRAITS.window   ? (TRAITS.causal ? min_of(window_right, 0) : window_right)
                      : TRAITS.causal ? 0
                                      : kNoLimit;
    return {seq_len_q, seq_len_k, TRAITS.window ? window_left : kNoLimit, right};
}

}  // namespace flash
