// The order of work of src/include/hopper/work_items.cuh on the host, against counting every row and key.
#include <cstdio>
#include <map>
#include <set>
#include <tuple>

#include "hopper/require.h"
#include "hopper/work_items.cuh"

using namespace flash::hopper;

// Keys that query `row` sees: bottom-right alignment.
static int visible_keys(int row, int seq_len_q, int seq_len_k, bool causal) {
    if (!causal) return seq_len_k;
    const int visible = row + seq_len_k - seq_len_q + 1;
    return visible < 0 ? 0 : visible < seq_len_k ? visible : seq_len_k;
}

template <int B_r, int B_c, bool kCausal>
static void check(int batch, int n_heads, int seq_len_q, int seq_len_k, int section_heads) {
    WorkShape shape{};
    REQUIRE(plan_work(batch, n_heads, seq_len_q, seq_len_k, B_r, kCausal, section_heads, shape), "refused");
    std::map<std::tuple<int, int, int>, int> n_kv_blocks;
    std::map<int, int> last_of_section;
    for (int number = 0; number < shape.n_items; ++number) {
        const WorkItem item = work_item<B_r, B_c, kCausal>(shape, number);
        const bool fresh =
            n_kv_blocks.emplace(std::tuple{item.batch, item.head, item.q_block}, item.n_kv_blocks).second;
        REQUIRE(fresh, "item %d comes twice", number);
        // Longest first inside a section.
        const int section = (item.batch * n_heads + item.head) / shape.section_heads;
        const auto last = last_of_section.find(section);
        REQUIRE(last == last_of_section.end() || last->second >= item.n_kv_blocks, "item %d", number);
        REQUIRE(last_of_section.upper_bound(section) == last_of_section.end(), "item %d goes back", number);
        last_of_section[section] = item.n_kv_blocks;
    }
    for (int b = 0; b < batch; ++b) {
        for (int h = 0; h < n_heads; ++h) {
            for (int block = 0; block * B_r < seq_len_q; ++block) {
                int most =
                    0;  // over all rows of the block, those past the end too: they are computed and dropped
                for (int row = block * B_r; row < (block + 1) * B_r; ++row) {
                    const int keys = visible_keys(row, seq_len_q, seq_len_k, kCausal);
                    if (keys > most) most = keys;
                }
                const auto item = n_kv_blocks.find({b, h, block});
                if (block < shape.first_q_block) {
                    REQUIRE(most == 0, "block %d sees %d keys and is left out", block, most);
                    REQUIRE(item == n_kv_blocks.end(), "block %d is an item", block);
                } else {
                    REQUIRE(item != n_kv_blocks.end(), "block %d is missing", block);
                    REQUIRE(item->second == (most + B_c - 1) / B_c && item->second >= 1,
                            "block %d: %d tiles for %d keys", block, item->second, most);
                }
            }
        }
    }
}

template <int B_r, int B_c>
static void check_masks() {
    for (const int seq_len_q : {1, 63, 64, 65, 129, 300, 777}) {
        for (const int seq_len_k : {0, 1, 64, 127, 128, 129, 500, 777}) {
            for (const int section_heads : {1, 2, 4, 32}) {
                check<B_r, B_c, false>(2, 3, seq_len_q, seq_len_k, section_heads);
                check<B_r, B_c, true>(2, 3, seq_len_q, seq_len_k, section_heads);
            }
        }
    }
}

static void test_section_width() {
    // d 64: 256 bytes a key and value; 8 KiB a key give 32 heads. d 128: 16; d 256: 8.
    REQUIRE(section_width(false, 512, 512, 256) == 32, "d 64");
    REQUIRE(section_width(false, 512, 512, 512) == 16, "d 128");
    REQUIRE(section_width(false, 512, 512, 1024) == 8, "d 256");
    // 32 MiB hold 4 heads of 8 MiB (16384 keys at d 128), and one head that is larger than all of it.
    REQUIRE(section_width(false, 16384, 16384, 512) == 4, "L2");
    REQUIRE(section_width(false, 1, 1 << 20, 1024) == 1, "one head at least");
    REQUIRE(section_width(true, 2048, 2048, 512) == 32 && section_width(true, 4096, 4096, 512) == 16,
            "causal");
    REQUIRE(section_width(false, 1, 0, 512) == 1, "no keys");
}

static void test_limits() {
    WorkShape shape{};
    REQUIRE(plan_work(65536, 3, 64, 64, 128, false, 32, shape) && shape.n_items == 65536 * 3,
            "past 65535 heads");
    REQUIRE(!plan_work(1 << 16, 1 << 16, 64, 64, 128, false, 32, shape), "2^32 heads");
    REQUIRE(!plan_work(1, 1, kMaxSeqLen + 1, 64, 128, false, 32, shape), "queries");
    REQUIRE(!plan_work(1, 1, 64, kMaxSeqLen + 1, 128, false, 32, shape), "keys");
    REQUIRE(!plan_work(1 << 15, 1 << 10, 1 << 20, 64, 64, false, 32, shape), "2^39 items");
}

int main() {
    check_masks<128, 128>();
    check_masks<192, 128>();
    check_masks<256, 64>();
    check_masks<128, 80>();
    test_section_width();
    test_limits();
    std::puts("work items: ok");
}
