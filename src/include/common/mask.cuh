// Which keys a query sees, and what follows from it for whole tiles.
//
// Masks are aligned bottom-right: query i stands at key p = i + (seq_len_k - seq_len_q). With a causal
// mask it sees the keys up to p, with a window the keys p - window_left … p + window_right; in any case
// the keys visible_begin(i) … visible_end(i) - 1. Limits of a window have either sign: one that lies wholly
// before or behind the keys, or is empty, hides them all. Both bounds grow with i by at most 1 a row, so of
// the K/V blocks of B_c keys a Q block visits
//
//     blocks begin … full_begin - 1        some query does not see some key (the window's left edge)
//     blocks full_begin … full_end - 1     every query of the Q block sees every key: no mask is applied
//     blocks full_end … end - 1            some query does not see some key (the diagonal, the last keys)
//     all others                           nobody sees anything: not visited
//
// from end - 1 down to begin. Without a window begin and full_begin are 0, at compile time.
//
// kSeenBefore: only those blocks count as full before which every query has seen some key in a block that was
// visited earlier.
#pragma once

#include "common/cuda_utils.cuh"
#include "flash_attention.cuh"

namespace flash {

// Sequences under a window are at most this long, so that a position plus a bound of -2^30 … 2^30 - 1 fits 32
// bits, of rows behind the last of a Q block too.
inline constexpr int kMaxWindowedLength = (1 << 30) - 256;

struct KeyBlocks {
    int begin;
    int full_begin;
    int full_end;
    int end;

    constexpr bool operator==(const KeyBlocks &) const = default;

    // Part `part` (0 … n_splits - 1) of the blocks: all parts together are the whole, none is longer than
    // another by more than one block, and some are empty where there are fewer blocks than parts.
    template <bool kSeenBefore = false>
    FLASH_HOST_DEVICE constexpr KeyBlocks part(int part, int n_splits) const {
        const int size = (end - begin) / n_splits;
        const int longer = (end - begin) % n_splits;  // the first so many parts have size + 1 blocks
        const int first = begin + part * size + min_of(part, longer);
        const int last = first + size + (part < longer);
        // The block that a part visits first shows every query a key, unless it is beyond full_end.
        const int part_full_end = clamp(full_end, first, max_of(first, kSeenBefore ? last - 1 : last));
        return {first, clamp(full_begin, first, part_full_end), part_full_end, last};
    }

    // Chunk `number` of `tiles` blocks each, counted from key 0: the blocks of it that are visited.
    FLASH_HOST_DEVICE constexpr KeyBlocks chunk(int number, int tiles) const {
        const int first = clamp(number * tiles, begin, end), last = clamp((number + 1) * tiles, first, end);
        const int own_full_end = clamp(full_end, first, last);
        return {first, clamp(full_begin, first, own_full_end), own_full_end, last};
    }

    // The same of part `number` of `n_parts`, of a sequence of `chunks` chunks. Where these are more than
    // the parts it is not cut: its part 0 has all blocks.
    FLASH_HOST_DEVICE constexpr KeyBlocks chunk_part(int number, int n_parts, int tiles, int chunks) const {
        KeyBlocks blocks = *this;
        if (chunks <= n_parts) {
            blocks = chunk(number, tiles);
        } else if (number > 0) {
            blocks.end = begin;
        }
        return blocks;
    }

  private:
    static FLASH_HOST_DEVICE constexpr int clamp(int x, int low, int high) {
        return min_of(max_of(x, low), high);
    }
};

// Tiles of a chunk of keys (chunks.cuh), where parts are chunks; 0: they are not.
template <typename Kernel>
FLASH_HOST_DEVICE constexpr int chunk_tiles_of() {
    if constexpr (requires { Kernel::chunk_tiles; }) return Kernel::chunk_tiles;
    return 0;
}

template <ForwardTraits TRAITS>
struct Mask {
    int seq_len_q;
    int seq_len_k;
    int window_left = 0;   // read with a window only
    int window_right = 0;  // ... where a causal mask takes the place of a bound beyond 0

    // Where a row's keys end, counted from its own place. Without either trait nobody asks.
    FLASH_HOST_DEVICE constexpr int right() const {
        if constexpr (!TRAITS.window) return 0;
        return TRAITS.causal ? min_of(window_right, 0) : window_right;
    }

    // One past the last key that query `row` sees; no more than visible_begin(row) if it sees none.
    FLASH_HOST_DEVICE constexpr int visible_end(int row) const {
        if constexpr (TRAITS.window) {
            return max_of(0, min_of(seq_len_k, row + (seq_len_k - seq_len_q) + right() + 1));
        } else if constexpr (TRAITS.causal) {
            return max_of(0, min_of(seq_len_k, row + 1 + (seq_len_k - seq_len_q)));
        } else {
            return seq_len_k;
        }
    }

    // The first key that query `row` sees, if it sees any.
    FLASH_HOST_DEVICE constexpr int visible_begin(int row) const {
        if constexpr (TRAITS.window) {
            return max_of(0, row + (seq_len_k - seq_len_q) - window_left);
        } else {
            return 0;
        }
    }

    // The blocks that queries first_row … last_row visit.
    template <bool kSeenBefore = false>
    FLASH_HOST_DEVICE constexpr KeyBlocks key_blocks(int first_row, int last_row, int B_c) const {
        const int end = ceil_div(visible_end(last_row), B_c);
        const int full_keys = kSeenBefore ? max_of(visible_end(first_row) - 1, 0) : visible_end(first_row);
        const int full_end = min_of(full_keys / B_c, end);
        if constexpr (TRAITS.window) {
            const int begin = min_of(visible_begin(first_row) / B_c, end);
            const int full_begin = ceil_div(visible_begin(last_row), B_c);
            if (full_begin >= full_end) return {begin, begin, begin, end};  // no block is seen whole
            return {begin, full_begin, full_end, end};
        } else {
            return {0, 0, full_end, end};
        }
    }
};

}  // namespace flash
