// block_coordinates.cuh: every (batch, head, Q block) is computed exactly once, longest first where
// asked for, in the order of tma/work_items.cuh, and the largest grids do not overflow.
#include <initializer_list>
#include <vector>

#include "ampere/forward/block_coordinates.cuh"
#include "check.h"
#include "tma/work_items.cuh"

using namespace flash::ampere;

template <bool kLongestFirst>
static void check_grid(int batch, int n_heads, int n_q_blocks, int section_heads) {
    const GridShape grid{n_q_blocks, n_heads, batch * n_heads, section_heads};
    std::vector<int> uses(batch * n_heads * n_q_blocks, 0);
    int previous_section = 0;
    int previous_q_block = n_q_blocks;
    for (int index = 0; index < batch * n_heads * n_q_blocks; ++index) {
        const BlockCoordinates at = grid.decode<kLongestFirst>(index);
        CHECK(0 <= at.batch && at.batch < batch && 0 <= at.head && at.head < n_heads);
        CHECK(0 <= at.q_block && at.q_block < n_q_blocks);
        ++uses[(at.batch * n_heads + at.head) * n_q_blocks + at.q_block];
        if constexpr (kLongestFirst) {
            const int section = (at.batch * n_heads + at.head) / section_heads;
            CHECK(section >= previous_section);
            if (section == previous_section) CHECK(at.q_block <= previous_q_block);
            previous_section = section;
            previous_q_block = at.q_block;

            flash::tma::WorkShape shape{};
            shape.n_heads = n_heads;
            shape.total_heads = batch * n_heads;
            shape.n_q_blocks = n_q_blocks;
            shape.section_heads = section_heads;
            const flash::tma::WorkItem item = flash::tma::ordered_item(shape, index);
            CHECK(item.batch == at.batch && item.head == at.head && item.q_block == at.q_block);
        }
    }
    for (const int n : uses) CHECK(n == 1);
}

int main() {
    for (const int batch : {1, 3}) {
        for (const int n_heads : {1, 4, 5}) {
            for (const int n_q_blocks : {1, 2, 7}) {
                check_grid<false>(batch, n_heads, n_q_blocks, 1);
                for (int section = 1; section <= batch * n_heads; ++section) {
                    check_grid<true>(batch, n_heads, n_q_blocks, section);
                }
            }
        }
    }

    constexpr int last = 0x7ffffffe;  // the last block of the largest grid, 2^31 - 1 blocks
    const GridShape one_head{last + 1, 1, 1, 1};
    CHECK(one_head.decode<false>(last).q_block == last);
    CHECK(one_head.decode<true>(last).q_block == 0);
    const GridShape many_heads{1, last + 1, last + 1, 32};
    CHECK(many_heads.decode<false>(last).head == last);
    CHECK(many_heads.decode<true>(last).head == last);

    CHECK(section_width(int64_t(512) << 10, 256) == 64);  // 64 * 512 KiB = 32 MiB
    CHECK(section_width(int64_t(8) << 20, 256) == 32);    // never fewer than 32,
    CHECK(section_width(int64_t(8) << 20, 6) == 6);       // unless there are no more
    CHECK(section_width(0, 7) == 7);
    CHECK(section_width(1, 1 << 30) == 1 << 25);
    return report();
}
