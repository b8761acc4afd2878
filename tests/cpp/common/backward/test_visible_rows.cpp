// visible_rows.cuh: which queries see a block of keys, which keys are seen, against looking at every pair.
#include <initializer_list>

#include "check.h"
#include "common/backward/visible_rows.cuh"

using namespace flash;

// The definition: query `row` stands at key row + (seq_len_k - seq_len_q).
template <BackwardTraits TRAITS>
static bool visible(const VisibleRows<TRAITS> &mask, int row, int key) {
    const int place = row + (mask.seq_len_k - mask.seq_len_q);
    if (TRAITS.causal && key > place) return false;
    if (TRAITS.window && (key < place - mask.window_left || key > place + mask.window_right)) return false;
    return 0 <= key && key < mask.seq_len_k;
}

// What is left of a range when its members are named one by one; an empty one has no place.
struct Found {
    int begin = -1, end = -1;
    bool whole = true;  // no gap

    void add(int x) {
        if (begin < 0) begin = x;
        whole = whole && (end < 0 || end == x);
        end = x + 1;
    }
    bool is(Range range) const {
        return whole && (begin < 0 ? range.begin >= range.end : range == Range{begin, end});
    }
};

template <BackwardTraits TRAITS>
static void check_blocks(const VisibleRows<TRAITS> &mask, int size) {
    for (int first = 0; first < mask.seq_len_k; first += size) {
        const Range keys{first, min_of(first + size, mask.seq_len_k)};
        Found rows;
        for (int row = 0; row < mask.seq_len_q; ++row) {
            bool any = false;
            for (int key = keys.begin; key < keys.end; ++key) any = any || visible(mask, row, key);
            if (any) rows.add(row);
        }
        CHECK(rows.is(mask.rows_of(keys)));
        for (int row = 0; row < mask.seq_len_q; row += 3) {
            for (int last = row; last < min_of(row + 5, mask.seq_len_q); ++last) {
                bool all = true;
                for (int r = row; r <= last; ++r) {
                    for (int key = keys.begin; key < keys.end; ++key) all = all && visible(mask, r, key);
                }
                CHECK(all == mask.sees_all(row, last, keys));
            }
        }
        CHECK(!mask.sees_all(0, 0, {first, mask.seq_len_k + 1}));  // keys beyond the last one are not seen
    }
}

// What a block of queries sees is a range of keys, and the tiles of keys that it is visited from are those of
// this range, the first and the last included.
template <BackwardTraits TRAITS>
static void check_query_blocks(const VisibleRows<TRAITS> &mask, int rows, int tile) {
    for (int first = 0; first < mask.seq_len_q; first += rows) {
        const int end = min_of(first + rows, mask.seq_len_q);
        Found keys, tiles;
        for (int key = 0; key < mask.seq_len_k; ++key) {
            bool any = false;
            for (int row = first; row < end; ++row) any = any || visible(mask, row, key);
            if (any) keys.add(key);
        }
        for (int begin = 0; begin < mask.seq_len_k; begin += tile) {
            const Range seeing = mask.rows_of({begin, min_of(begin + tile, mask.seq_len_k)});
            if (max_of(seeing.begin, first) < min_of(seeing.end, end)) tiles.add(begin / tile);
        }
        CHECK((keys.begin < 0) == (tiles.begin < 0));
        if (keys.begin < 0) continue;
        const Range found = mask.keys_of_rows({first, first + rows});
        CHECK(keys.is(found));
        CHECK(tiles.is({found.begin / tile, (found.end - 1) / tile + 1}));
    }
}

template <BackwardTraits TRAITS>
static void check_mask(const VisibleRows<TRAITS> &mask) {
    Found rows, keys;
    for (int row = 0; row < mask.seq_len_q; ++row) {
        bool any = false;
        for (int key = 0; key < mask.seq_len_k; ++key) {
            CHECK(visible(mask, row, key) == mask.keys_of(row).has(key));
            any = any || visible(mask, row, key);
        }
        if (any) rows.add(row);
    }
    for (int key = 0; key < mask.seq_len_k; ++key) {
        bool any = false;
        for (int row = 0; row < mask.seq_len_q; ++row) any = any || visible(mask, row, key);
        if (any) keys.add(key);
    }
    CHECK(rows.is(mask.seeing_rows()));
    CHECK(keys.is(mask.seen_keys()));
    for (int size : {1, 4, 7}) {
        check_blocks(mask, size);
        for (int rows : {1, 3, 8}) check_query_blocks(mask, rows, size);
    }
}

int main() {
    constexpr BackwardTraits plain{}, causal{.causal = true}, window{.window = true};
    constexpr BackwardTraits causal_window{.causal = true, .window = true};
    for (int q : {0, 1, 2, 7, 12}) {
        for (int k : {0, 1, 3, 7, 16}) {
            check_mask(VisibleRows<plain>{q, k});
            check_mask(VisibleRows<causal>{q, k});
            for (int left : {-9, -2, 0, 1, 5, (1 << 30) - 1}) {
                for (int right : {-20, -3, -1, 0, 2, 6, (1 << 30) - 1}) {
                    check_mask(VisibleRows<window>{q, k, left, right});
                    check_mask(VisibleRows<causal_window>{q, k, left, right});
                }
            }
        }
    }
    return report();
}
