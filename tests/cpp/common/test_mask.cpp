// mask.cuh: visible keys, block ranges and their parts, against looking at every query and key.
#include <initializer_list>

#include "check.h"
#include "common/mask.cuh"

using namespace flash;

// The definition: query `row` stands at key row + (seq_len_k - seq_len_q).
template <ForwardTraits TRAITS>
static bool visible(const Mask<TRAITS> &mask, int row, int key) {
    const int place = row + (mask.seq_len_k - mask.seq_len_q);
    if (TRAITS.causal && key > place) return false;
    if (TRAITS.window && (key < place - mask.window_left || key > place + mask.window_right)) return false;
    return 0 <= key && key < mask.seq_len_k;
}

template <ForwardTraits TRAITS>
static void check_rows(const Mask<TRAITS> &mask) {
    for (int row = 0; row < mask.seq_len_q; ++row) {
        for (int key = 0; key < mask.seq_len_k; ++key) {
            const bool sees = visible(mask, row, key);
            CHECK(sees == (mask.visible_begin(row) <= key && key < mask.visible_end(row)));
        }
    }
}

// Of the keys of a block: whether any query of first … last sees any, whether all see all.
struct Sight {
    bool any = false;
    bool all = true;
};

template <ForwardTraits TRAITS>
static Sight sight(const Mask<TRAITS> &mask, int first, int last, int block, int B_c) {
    Sight result;
    for (int row = first; row <= last; ++row) {
        for (int key = block * B_c; key < (block + 1) * B_c; ++key) {
            const bool sees = visible(mask, row, key);
            result.any = result.any || sees;
            result.all = result.all && sees;
        }
    }
    return result;
}

static bool is_ordered(const KeyBlocks &blocks) {
    return blocks.begin <= blocks.full_begin && blocks.full_begin <= blocks.full_end &&
           blocks.full_end <= blocks.end;
}

static bool is_full(const KeyBlocks &blocks, int block) {
    return blocks.full_begin <= block && block < blocks.full_end;
}

// Every query of first … last sees a key in the blocks behind `block` that are visited.
template <ForwardTraits TRAITS>
static bool all_saw_a_key(const Mask<TRAITS> &mask, int first, int last, int block, int end, int B_c) {
    for (int row = first; row <= last; ++row) {
        bool saw = false;
        for (int key = (block + 1) * B_c; key < end * B_c; ++key) saw = saw || visible(mask, row, key);
        if (!saw) return false;
    }
    return true;
}

template <ForwardTraits TRAITS>
static void check_blocks(const Mask<TRAITS> &mask, int B_r, int B_c) {
    for (int first = 0; first < mask.seq_len_q; first += B_r) {
        const int last = min_of(first + B_r, mask.seq_len_q) - 1;
        const KeyBlocks blocks = mask.key_blocks(first, last, B_c);
        const KeyBlocks seen_before = mask.template key_blocks<true>(first, last, B_c);
        CHECK(is_ordered(blocks) && is_ordered(seen_before));
        // Where a window hides all keys from these queries, they may visit blocks all the same.
        const bool sees_nothing = !sight(mask, first, last, 0, max_of(mask.seq_len_k, 1)).any;
        CHECK(seen_before.begin == blocks.begin && seen_before.end == blocks.end);
        for (int block = 0; block < ceil_div(mask.seq_len_k, B_c); ++block) {
            const Sight s = sight(mask, first, last, block, B_c);
            const bool visited = blocks.begin <= block && block < blocks.end;
            CHECK(s.any == visited || (visited && sees_nothing));
            CHECK(s.all == is_full(blocks, block));
            const bool steady = s.all && all_saw_a_key(mask, first, last, block, blocks.end, B_c);
            CHECK(is_full(seen_before, block) == steady);
        }
        for (const int n_splits : {1, 2, 3, 7}) {
            int next = blocks.begin;
            for (int i = 0; i < n_splits; ++i) {
                const KeyBlocks part = blocks.part(i, n_splits);
                const KeyBlocks steady = seen_before.template part<true>(i, n_splits);
                CHECK(is_ordered(part) && is_ordered(steady));
                CHECK(part.begin == next && steady.begin == next && steady.end == part.end);
                CHECK(part.end - part.begin >= (blocks.end - blocks.begin) / n_splits);
                CHECK(part.end - part.begin <= ceil_div(blocks.end - blocks.begin, n_splits));
                next = part.end;
                for (int block = part.begin; block < part.end; ++block) {
                    CHECK(is_full(part, block) == is_full(blocks, block));
                    if (!is_full(steady, block)) continue;
                    CHECK(is_full(blocks, block));
                    CHECK(all_saw_a_key(mask, first, last, block, part.end, B_c));
                }
            }
            CHECK(next == blocks.end);
        }
        for (const int tiles : {1, 2, 3}) {  // chunks: at fixed places, whatever is visited
            int n_visited = 0;
            for (int i = 0; i <= ceil_div(mask.seq_len_k, B_c) / tiles; ++i) {
                const KeyBlocks chunk = blocks.chunk(i, tiles);
                CHECK(is_ordered(chunk));
                for (int block = chunk.begin; block < chunk.end; ++block) {
                    CHECK(block / tiles == i && blocks.begin <= block && block < blocks.end);
                    CHECK(is_full(chunk, block) == is_full(blocks, block));
                    ++n_visited;
                }
            }
            CHECK(n_visited == blocks.end - blocks.begin);
            // Parts are chunks where there are as many; else the first takes all.
            const int chunks = ceil_div(ceil_div(mask.seq_len_k, B_c), tiles);
            for (int part = 0; part <= chunks; ++part) {
                CHECK(blocks.chunk_part(part, chunks, tiles, chunks) == blocks.chunk(part, tiles));
                const KeyBlocks uncut = blocks.chunk_part(part, chunks - 1, tiles, chunks);
                CHECK(part == 0 ? uncut == blocks : uncut.begin == uncut.end);
            }
        }
    }
}

template <ForwardTraits TRAITS>
static void check(const Mask<TRAITS> &mask) {
    check_rows(mask);
    check_blocks(mask, 32, 16);
    check_blocks(mask, 16, 64);
}

constexpr ForwardTraits kPlain{}, kCausal{.causal = true}, kWindow{.window = true},
    kBoth{.causal = true, .window = true};

int main() {
    constexpr int unbounded = (1 << 30) - 1, lowest = -(1 << 30);
    for (const int seq_len_q : {1, 2, 15, 16, 17, 64, 100}) {
        for (const int seq_len_k : {0, 1, 31, 32, 33, 64, 130}) {
            check(Mask<kPlain>{seq_len_q, seq_len_k});
            check(Mask<kCausal>{seq_len_q, seq_len_k});
            for (const int left : {0, 5, 32, 70, unbounded, -1, -4, -33, -100, lowest}) {
                for (const int right : {0, 3, 16, unbounded, -1, -5, -32, -130, lowest}) {
                    check(Mask<kWindow>{seq_len_q, seq_len_k, left, right});
                }
                check(Mask<kBoth>{seq_len_q, seq_len_k, left, 7});
                check(Mask<kBoth>{seq_len_q, seq_len_k, left, -3});
            }
        }
    }
    // The longest sequences and the widest windows overflow nowhere.
    constexpr int longest = kMaxWindowedLength;
    constexpr Mask<kWindow> wide{longest, longest, unbounded, unbounded};
    CHECK(wide.visible_begin(longest - 1) == 0 && wide.visible_end(0) == longest);
    CHECK((Mask<kWindow>{longest, 1, unbounded, 0}.visible_end(0) == 0));
    CHECK((Mask<kWindow>{1, longest, 0, unbounded}.visible_begin(0) == longest - 1));
    CHECK((Mask<kCausal>{longest, 3}.visible_end(0) == 0));
    CHECK((Mask<kWindow>{longest, 1, lowest, lowest}.visible_end(0) == 0));
    CHECK((Mask<kWindow>{1, longest, lowest, lowest}.visible_begin(255) > longest));
    CHECK((Mask<kWindow>{1, longest, unbounded, unbounded}.visible_end(255) == longest));
    CHECK((Mask<kWindow>{1, longest, unbounded, 1 - longest}.visible_end(0) == 1));
    CHECK((Mask<kWindow>{longest, longest, 1 - longest, unbounded}.visible_begin(0) == longest - 1));
    CHECK((wide.key_blocks(0, 0, 64) == KeyBlocks{0, 0, longest / 64, longest / 64}));
    CHECK((KeyBlocks{0, 0, 1 << 26, 1 << 26}.part(255, 256).end == 1 << 26));
    return report();
}
