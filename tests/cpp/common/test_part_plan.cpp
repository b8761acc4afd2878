// Parts of the keys that the device plans: within bounds for all lengths, in a workspace of the size that
// flash_helpers/select/part_plan.py allocates.
#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "common/part_plan.cuh"

using namespace flash;

namespace {

std::mt19937 random_bits{7};
int between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_bits); }

void check_bounds() {
    for (int i = 0; i < 20000; ++i) {
        const PartPlan plan = PartPlan::of(between(1, 600), between(1, 8), between(1, 64), between(0, 16), 0);
        const int tiles = between(0, 3000), queries = between(1, 64);
        const int64_t items = between(0, 3) == 0 ? between(1, 100000) : between(1, 600);
        const int parts = plan.parts(items, tiles, queries);
        CHECK(parts >= 1 && parts <= kMostParts);
        CHECK(parts == 1 || tiles / parts >= plan.shortest.divisor);
        const bool few = queries <= plan.few_queries;
        const int most = std::max(1, std::min(kMostParts, tiles / plan.shortest.divisor));
        if (few) CHECK(parts == most || ceil_div(tiles, parts) <= plan.longest.divisor);
    }
}

void check_extremes() {
    const PartPlan none = PartPlan::of(0, 4, 32, 8, 0), fixed = PartPlan::of(132, 4, 32, 8, 7),
                   plan = PartPlan::of(132, 2, 16, 8, 0);
    CHECK(none.parts(1, 100000, 1) == 1);
    CHECK(fixed.parts(100000, 100, 1000) == 7 && fixed.parts(1, 3, 1) == 3 && fixed.parts(1, 0, 1) == 1);
    CHECK(plan.parts(8, 128, 100) == 16);       // one sequence fills the GPU, as far as a wave goes
    CHECK(plan.parts(132 * 4, 128, 100) == 1);  // a GPU that is full is left alone
    CHECK(plan.parts(132 * 4, 128, 1) == 8);    // ... but for the longest part of few queries
    CHECK(plan.parts(int64_t(1) << 40, 1 << 24, 100) == 1);
    CHECK(plan.parts(int64_t(1) << 40, 1 << 24, 1) == kMostParts);
}

// Rows of the workspace that sequences of random lengths take, against the bound.
void check_workspace() {
    for (int i = 0; i < 3000; ++i) {
        const int B_r = between(0, 1) ? 64 : 128, B_c = between(0, 1) ? 64 : 128;
        const int group = 1 << between(0, 4), row_heads = between(1, 16), batch = between(1, 80);
        const int block_queries = B_r / group, longest_q = between(0, 1) ? between(1, 8) : between(1, 3000);
        const int slots = between(100, 300), tiles = between(1, 2000), shortest = 256 / B_c;
        const PartPlan plan =
            PartPlan::of(slots, shortest, between(shortest, 64), std::min(8, block_queries), 0);
        int64_t rows = 0;
        for (int b = 0; b < batch; ++b) {
            const int queries = between(0, 3) ? between(1, std::min(longest_q, 8)) : between(1, longest_q);
            const int blocks = ceil_div(queries, block_queries);
            const int parts = plan.parts(int64_t(batch) * row_heads * blocks, between(0, tiles), queries);
            if (parts > 1) rows += int64_t(queries) * group * row_heads * parts;
        }
        const int64_t waves = int64_t(kMostWaves) * slots * std::min(B_r, longest_q * group);
        const int64_t few_rows = int64_t(batch) * std::min(8, longest_q) * group * row_heads;
        CHECK(rows <= waves + few_rows * ceil_div(tiles, plan.longest.divisor));
    }
}

}  // namespace

int main() {
    check_bounds();
    check_extremes();
    check_workspace();
    return report();
}
