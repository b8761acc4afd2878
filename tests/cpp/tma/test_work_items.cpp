// The order of work of src/include/tma/work_items.cuh on the host, against counting every row and key.
#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <tuple>

#include "require.h"
#include "tma/work_items.cuh"

using namespace flash;
using namespace flash::tma;

// Of a mask that is aligned bottom-right: query `row` sees the keys left before to right after its place.
struct Visibility {
    int seq_len_q, seq_len_k, left, right;
};
constexpr int kUnbounded = (1 << 30) - 1;

// Whether a query of first ... last sees a key of begin ... end - 1.
static bool any_sees(const Visibility &sees, int first, int last, int begin, int end) {
    for (int row = first; row <= last; ++row) {
        const int place = row + sees.seq_len_k - sees.seq_len_q;
        const int64_t from = std::max(int64_t{place} - sees.left, int64_t{begin});
        const int64_t to = std::min(int64_t{place} + sees.right, int64_t{min_of(end, sees.seq_len_k)} - 1);
        if (from <= to) return true;
    }
    return false;
}

// Every tile that some query of a block sees is visited by exactly one part of one item, and no part visits a
// tile that none sees, or more than one tile more than another.
template <int B_r, int B_c, ForwardTraits TRAITS>
static void check(int batch, int n_heads, const Visibility &sees, int section_heads, int n_splits) {
    const Mask<TRAITS> mask{sees.seq_len_q, sees.seq_len_k, sees.left, sees.right};
    WorkShape shape{};
    REQUIRE(plan_work(batch, n_heads, mask, B_r, section_heads, n_splits, shape), "refused");
    // (batch, head, query block) -> how often each tile is visited, and by how many items
    std::map<std::tuple<int, int, int>, std::map<int, int>> visits;
    std::map<std::tuple<int, int, int>, std::set<int>> parts;
    std::map<int, int> last_of_section;
    for (int number = 0; number < shape.n_items; ++number) {
        const WorkItem item = work_item<B_r, B_c>(shape, mask, n_splits, number);
        const std::tuple key{item.batch, item.head, item.q_block};
        REQUIRE(parts[key].insert(item.part).second, "item %d comes twice", number);
        for (int tile = item.first_kv_block; tile < item.end_kv_block; ++tile) ++visits[key][tile];
        REQUIRE(TRAITS.split || item.has_tiles(), "item %d has no tiles", number);
        REQUIRE(!item.has_tiles() || item.first_kv_block >= 0, "item %d", number);
        // From last to first query block inside a section.
        const int section = (item.batch * n_heads + item.head) / shape.section_heads;
        const auto last = last_of_section.find(section);
        REQUIRE(last == last_of_section.end() || last->second >= item.q_block, "item %d", number);
        REQUIRE(last_of_section.upper_bound(section) == last_of_section.end(), "item %d goes back", number);
        last_of_section[section] = item.q_block;
    }
    for (int b = 0; b < batch; ++b) {
        for (int h = 0; h < n_heads; ++h) {
            for (int block = 0; block * B_r < sees.seq_len_q; ++block) {
                const std::tuple key{b, h, block};
                const bool is_item = parts.count(key) != 0;
                REQUIRE(is_item == (block >= shape.first_q_block), "block %d", block);
                REQUIRE(!is_item || static_cast<int>(parts[key].size()) == n_splits, "block %d", block);
                // Rows past the end are computed and dropped; with them a block may visit more. One that sees
                // nothing may visit tiles all the same, and has to visit one if it is an item.
                const int first = block * B_r, end = min_of(first + B_r, sees.seq_len_q);
                const bool blind = !any_sees(sees, first, first + B_r - 1, 0, sees.seq_len_k);
                int n_visits = 0;
                for (int tile = 0; tile * B_c < sees.seq_len_k; ++tile) {
                    const int begin = tile * B_c;
                    const bool seen = any_sees(sees, first, end - 1, begin, begin + B_c);
                    const bool may_be = blind || any_sees(sees, first, first + B_r - 1, begin, begin + B_c);
                    const auto visited = visits[key].find(tile);
                    const int times = visited == visits[key].end() ? 0 : visited->second;
                    n_visits += times;
                    REQUIRE(times == seen || (times == 1 && may_be),
                            "block %d, tile %d: %d visits, wanted %d", block, tile, times, seen);
                }
                REQUIRE(TRAITS.split || !is_item || n_visits > 0, "block %d would wait for ever", block);
                REQUIRE(!blind || sees.left + sees.right < 0 || n_visits <= 1, "block %d", block);
            }
        }
    }
}

template <int B_r, int B_c>
static void check_masks() {
    for (const int sq : {1, 63, 64, 129, 300}) {
        for (const int sk : {0, 1, 64, 127, 129, 500}) {
            for (const int section_heads : {1, 4, 32}) {
                const auto run = [&]<ForwardTraits TRAITS>(int left, int right, int n_splits) {
                    check<B_r, B_c, TRAITS>(2, 3, {sq, sk, left, right}, section_heads, n_splits);
                };
                run.template operator()<ForwardTraits{}>(kUnbounded, kUnbounded, 1);
                run.template operator()<ForwardTraits{.causal = true}>(kUnbounded, 0, 1);
                for (const int left : {0, 1, 100, kUnbounded, -2, -90, -400}) {
                    run.template operator()<ForwardTraits{.causal = true, .window = true}>(left, 0, 1);
                    run.template operator()<ForwardTraits{.causal = true, .window = true}>(left, -7, 1);
                    for (const int right : {0, 130, kUnbounded, -3, -101, -600})
                        run.template operator()<ForwardTraits{.window = true}>(left, right, 1);
                }
                for (const int n_splits : {1, 2, 5}) {
                    run.template operator()<ForwardTraits{.split = true}>(kUnbounded, kUnbounded, n_splits);
                    run.template operator()<ForwardTraits{.causal = true, .split = true}>(kUnbounded, 0,
                                                                                          n_splits);
                    run.template operator()<ForwardTraits{.window = true, .split = true}>(70, 9, n_splits);
                    run.template operator()<ForwardTraits{.window = true, .split = true}>(-70, 200, n_splits);
                    run.template operator()<ForwardTraits{.window = true, .split = true}>(170, -9, n_splits);
                }
            }
        }
    }
}

// Parts that are chunks: each tile that a block visits is one part's, and no part has tiles of two chunks. A
// sequence of more chunks than parts is part 0's alone.
template <ForwardTraits TRAITS>
static void test_parts_are_chunks() {
    constexpr int B_r = 64, B_c = 32, kTiles = 4;
    for (const int sq : {1, 130}) {
        for (const int sk : {0, 1, 127, 128, 129, 1000}) {
            const Mask<TRAITS> mask{sq, sk, 300, 0};
            for (const int n_splits : {1, 2, 7, 8, 9, 20}) {
                const bool cut = ceil_div(sk, kTiles * B_c) <= n_splits;
                for (int block = 0; block * B_r < sq; ++block) {
                    const KeyBlocks all = mask.key_blocks(block * B_r, block * B_r + B_r - 1, B_c);
                    int next = all.begin;
                    for (int part = 0; part < n_splits; ++part) {
                        WorkItem item{.q_block = block, .part = part};
                        set_tiles<B_r, B_c, kTiles>(item, mask, n_splits);
                        if (!item.has_tiles()) continue;
                        REQUIRE(item.first_kv_block == next, "%d keys, part %d of %d", sk, part, n_splits);
                        next = item.end_kv_block;
                        const bool in_chunk =
                            item.first_kv_block / kTiles == part && (next - 1) / kTiles == part;
                        REQUIRE(cut ? in_chunk : part == 0, "%d keys, part %d of %d", sk, part, n_splits);
                    }
                    REQUIRE(next == max_of(all.begin, all.end), "%d keys, %d parts", sk, n_splits);
                }
            }
        }
    }
}

static void test_sections_are_about_as_wide() {
    REQUIRE(balanced_section(20, 16) == 10 && balanced_section(40, 16) == 14, "no narrow last section");
    REQUIRE(balanced_section(84, 32) == 28 && balanced_section(33, 32) == 17, "no narrow last section");
    REQUIRE(balanced_section(64, 16) == 16 && balanced_section(7, 32) == 7, "as wide as it may be");
    REQUIRE(balanced_section(5, 1) == 1 && balanced_section(0, 8) == 0, "one head; none");
    WorkShape packed{}, even{};
    const Mask<ForwardTraits{.causal = true, .varlen = true}> ragged{8192, 8192};
    REQUIRE(plan_work(2, 20, ragged, 128, 16, 1, packed) && packed.section_heads == 10, "of one sequence");
    REQUIRE(plan_work(2, 20, Mask<ForwardTraits{.causal = true}>{8192, 8192}, 128, 16, 1, even) &&
                even.section_heads == 14,
            "of all sequences");
}

static bool plan(int batch, int n_heads, int seq_len_q, int seq_len_k, int B_r, int n_splits,
                 WorkShape &shape) {
    return plan_work(batch, n_heads, Mask<ForwardTraits{.split = true}>{seq_len_q, seq_len_k}, B_r, 32,
                     n_splits, shape);
}

static void test_limits() {
    WorkShape shape{};
    REQUIRE(plan(65536, 3, 64, 64, 128, 1, shape) && shape.n_items == 65536 * 3, "past 65535 heads");
    REQUIRE(!plan(1 << 16, 1 << 16, 64, 64, 128, 1, shape), "2^32 heads");
    REQUIRE(!plan(1, 1, kMaxSeqLen + 1, 64, 128, 1, shape), "queries");
    REQUIRE(!plan(1, 1, 64, kMaxSeqLen + 1, 128, 1, shape), "keys");
    REQUIRE(!plan(1 << 15, 1 << 10, 1 << 20, 64, 64, 1, shape), "2^39 items");
    REQUIRE(!plan(1 << 12, 1 << 12, 64, 64, 64, 256, shape), "2^32 parts");
}

int main() {
    check_masks<128, 128>();
    check_masks<192, 128>();
    check_masks<256, 64>();
    check_masks<128, 80>();
    test_parts_are_chunks<ForwardTraits{.split = true}>();
    test_parts_are_chunks<ForwardTraits{.causal = true, .split = true}>();
    test_parts_are_chunks<ForwardTraits{.causal = true, .window = true, .varlen = true, .split = true}>();
    test_sections_are_about_as_wide();
    test_limits();
    std::puts("work items: ok");
}
