// The mask from the side of the keys: which queries see some key of a block of keys, and whether all of a
// tile's queries see all of its keys.
//
// Query i stands at key p = i + (seq_len_k - seq_len_q) and sees the keys p - left ... p + right (mask.cuh),
// where either limit may be negative. Both bounds grow by 1 a row, so the queries that see some key of a
// range of keys are a range too, and so are the keys that some query sees.
#pragma once

#include "backward.cuh"
#include "common/cuda_utils.cuh"
#include "common/mask.cuh"

namespace flash {

// begin ... end - 1; empty where end <= begin.
struct Range {
    int begin;
    int end;

    constexpr bool operator==(const Range &) const = default;
    FLASH_HOST_DEVICE constexpr bool has(int x) const { return begin <= x && x < end; }
};

template <BackwardTraits TRAITS>
struct VisibleRows {
    static constexpr bool kMasked = TRAITS.causal || TRAITS.window;

    int seq_len_q;
    int seq_len_k;
    int window_left = 0;   // read with a window only
    int window_right = 0;  // ... where a causal mask takes the place of a bound beyond 0

    FLASH_HOST_DEVICE constexpr int right() const {
        if constexpr (TRAITS.window) return TRAITS.causal ? min_of(window_right, 0) : window_right;
        return 0;
    }
    FLASH_HOST_DEVICE constexpr int offset() const { return seq_len_k - seq_len_q; }

    // The keys that query `row` sees.
    FLASH_HOST_DEVICE constexpr Range keys_of(int row) const {
        Range keys{0, seq_len_k};
        if constexpr (kMasked) keys.end = min_of(seq_len_k, row + offset() + right() + 1);
        if constexpr (TRAITS.window) keys.begin = max_of(0, row + offset() - window_left);
        return keys;
    }

    // The queries that see some key of `keys`, which exist.
    FLASH_HOST_DEVICE constexpr Range rows_of(Range keys) const {
        Range rows{0, keys.begin < keys.end ? seq_len_q : 0};
        if constexpr (TRAITS.window) {
            if (window_left + right() < 0) rows.end = 0;  // no query sees any key
            rows.end = min_of(rows.end, keys.end - offset() + window_left);
        }
        if constexpr (kMasked) rows.begin = max_of(0, keys.begin - offset() - right());
        return rows;
    }

    // The queries that see any key at all, and the keys that any query sees.
    FLASH_HOST_DEVICE constexpr Range seeing_rows() const { return rows_of({0, seq_len_k}); }
    FLASH_HOST_DEVICE constexpr Range seen_keys() const {
        const Range rows = seeing_rows();
        if (rows.begin >= rows.end) return {0, 0};
        return {keys_of(rows.begin).begin, keys_of(rows.end - 1).end};
    }

    // The keys that some of these queries see, one of which sees a key.
    FLASH_HOST_DEVICE constexpr Range keys_of_rows(Range rows) const {
        const Range seeing = seeing_rows();
        return {keys_of(max_of(rows.begin, seeing.begin)).begin,
                keys_of(min_of(rows.end, seeing.end) - 1).end};
    }

    // Whether each of these queries sees each of these keys. Queries beyond the last one count as seeing.
    FLASH_HOST_DEVICE constexpr bool sees_all(int first_row, int last_row, Range keys) const {
        bool all = keys.end <= seq_len_k;
        if constexpr (kMasked) all = all && keys_of(first_row).end >= keys.end;
        if constexpr (TRAITS.window) all = all && keys_of(last_row).begin <= keys.begin;
        return all;
    }
};

}  // namespace flash
