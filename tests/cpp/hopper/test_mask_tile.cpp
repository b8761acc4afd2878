// Scores that a mask of the user's hides become -inf, and no others.
#include <cmath>

#include "check.h"
#include "hopper/mask_tile.cuh"

namespace {

bool sees(int row, int column, int seed) { return (row * 31 + column * 17 + seed) % 5 < 2; }

template <int n, int kMostAtATime>
void check(int seed) {
    for (int lane = 0; lane < 32; ++lane) {
        float scores[n / 2];
        for (int i = 0; i < n / 2; ++i) scores[i] = float(i);
        const int row = flash::accumulator(lane, 0).row;
        flash::hopper::hide_unseen<n, kMostAtATime>(scores, lane, seed < 0, [&](int column) {
            CHECK(column >= 0 && column < n);
            return uint32_t{sees(row, column, seed)} | uint32_t{sees(row + 8, column, seed)} << 1;
        });
        for (int i = 0; i < n / 2; ++i) {
            const auto [of_row, column] = flash::accumulator(lane, i);
            const bool seen = seed >= 0 && sees(of_row, column, seed);
            CHECK(scores[i] == (seen ? float(i) : -INFINITY));
        }
    }
}

template <int n>
void check_width() {
    for (int seed : {0, 1, 2, 3, -1}) {
        check<n, 2>(seed);
        check<n, 4>(seed);
    }
}

}  // namespace

int main() {
    check_width<16>();
    check_width<48>();
    check_width<64>();
    check_width<80>();
    check_width<96>();
    check_width<112>();
    check_width<128>();
    check_width<192>();
    check_width<256>();
    return report();
}
