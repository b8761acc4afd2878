// query_walk.cuh: each tile once for each head, steps forth and back, and what ordered sums rest on: of two
// blocks that add to a tile, the one that adds first comes to it no later than the other.
#include <initializer_list>
#include <vector>

#include "ampere/backward/query_walk.cuh"
#include "check.h"

using namespace flash;
using namespace flash::ampere;

static void check_walk(Range tiles, int n_heads) {
    std::vector<QueryWalk> visits;
    for (QueryWalk at(tiles, n_heads); !at.ended(); at.advance()) visits.push_back(at);
    const int n_tiles = tiles.end - tiles.begin;
    CHECK(static_cast<int>(visits.size()) == n_tiles * n_heads);
    for (int i = 0; i < n_tiles * n_heads; ++i) {
        CHECK(visits[i].tile == tiles.end - 1 - i / n_heads);
        CHECK(visits[i].head == i % n_heads);
        if (i > 1) {
            CHECK(visits[i].back<1>().tile == visits[i - 1].tile);
            CHECK(visits[i].back<2>().head == visits[i - 2].head);
            CHECK(visits[i].back<2>().tile == visits[i - 2].tile);
            CHECK(visits[i - 2].ahead<2>().tile == visits[i].tile);
            CHECK(visits[i - 1].ahead<1>().head == visits[i].head);
        }
        CHECK(visits[i].ahead<1>().ended() == (i + 1 == n_tiles * n_heads));
        CHECK(visits[i].ahead<2>().ended() == (i + 2 >= n_tiles * n_heads));
    }
}

// Steps until a block visits a tile.
static int steps(Range tiles, int tile) { return tiles.end - 1 - tile; }

template <BackwardTraits TRAITS>
static void check_order(const VisibleRows<TRAITS> &mask, int B_r, int B_c) {
    Range before{};
    for (int first_key = 0; first_key < mask.seq_len_k; first_key += B_c) {
        const Range rows = mask.rows_of({first_key, min_of(first_key + B_c, mask.seq_len_k)});
        if (rows.begin >= rows.end) continue;
        const Range tiles{rows.begin / B_r, ceil_div(rows.end, B_r)};
        for (int tile = tiles.begin; tile < tiles.end; ++tile) {
            if (before.has(tile)) CHECK(steps(before, tile) <= steps(tiles, tile));
        }
        before = tiles;
    }
}

int main() {
    for (const int n_heads : {1, 2, 5}) {
        for (const Range tiles : {Range{0, 1}, Range{0, 4}, Range{3, 4}, Range{2, 7}, Range{0, 0}}) {
            check_walk(tiles, n_heads);
        }
    }
    constexpr BackwardTraits plain{}, causal{.causal = true}, window{.window = true};
    for (const int seq_len_q : {1, 64, 65, 500}) {
        for (const int seq_len_k : {1, 128, 300, 1000}) {
            check_order(VisibleRows<plain>{seq_len_q, seq_len_k}, 64, 128);
            check_order(VisibleRows<causal>{seq_len_q, seq_len_k}, 64, 128);
            for (const Range sides :
                 {Range{0, 0}, Range{40, 9}, Range{200, -20}, Range{-5, 90}, Range{300, 300}}) {
                check_order(VisibleRows<window>{seq_len_q, seq_len_k, sides.begin, sides.end}, 64, 32);
            }
        }
    }
    return report();
}
