// A row's sum of exponentials is right where a function adds to its scores a number that grows evenly with
// the distance between key and query, whichever step takes its tiles, also where all of it is far from 0.
#include <cuda_runtime.h>

#include <array>
#include <random>
#include <vector>

#include "check.h"
#include "common/fragments.cuh"
#include "common/softmax_scale.cuh"
#include "hopper/forward/softmax.cuh"

using namespace flash;

namespace {

constexpr int kB_c = 64, kElements = kB_c / 2, kTiles = 5;
using Tile = std::array<std::array<float, kElements>, 32>;  // of each lane

// `step`: from key to key, and `at_none` at the distance 0, of scores before the scale.
void check(float scale, float step, float at_none, int first_row, bool exact) {
    std::mt19937 bits(7);
    std::normal_distribution<float> normal(0.f, 3.f);
    std::vector<Tile> scores(kTiles);
    for (Tile &tile : scores) {
        for (auto &lane : tile) {
            for (float &s : lane) s = normal(bits);
        }
    }
    const float factor = scale * kLog2e, lowest = lowest_score(factor);
    std::array<std::array<double, 2>, 32> largest{}, sums{};
    FakeWarp::run(0, [&] {
        const int lane = FakeWarp::lane();
        const int row = first_row + accumulator(lane, 0).row, column = accumulator(lane, 0).column;
        hopper::OnlineSoftmax<kB_c, true> softmax;
        const auto from = [&](int tile) {
            const float distance = float(tile * kB_c + column - row);
            return hopper::FromRowStart{
                {fmaf(step, distance, at_none), fmaf(step, distance - 8, at_none)}, step, step * factor};
        };
        for (int tile = kTiles - 1; tile >= 0; --tile) {  // as kernels take them
            float s[kElements];
            std::copy(scores[tile][lane].begin(), scores[tile][lane].end(), s);
            if (tile == kTiles - 1) {
                softmax.exact_step<true>(s, factor, lowest, from(tile));
            } else if (exact) {
                softmax.exact_step<false>(s, factor, lowest, from(tile));
            } else {
                softmax.lagged_step(s, factor, from(tile));
                if (softmax.warp_outgrew(hopper::kToleratedGrowth)) {
                    CHECK(!softmax.warp_outgrew(hopper::kRescalableGrowth));
                    softmax.adopt_growth(s, factor, 1 / factor);
                }
            }
        }
        for (int r = 0; r < 2; ++r) {
            double exponent = softmax.reference[r] * double(factor);
            largest[lane][r] = exponent;
            sums[lane][r] = exponent + std::log2(double(quad_sum(softmax.sum[r])));
        }
    });
    for (int lane = 0; lane < 32; ++lane) {
        for (int r = 0; r < 2; ++r) {
            std::vector<double> exponents;
            for (int other = lane / 4 * 4; other < lane / 4 * 4 + 4; ++other) {
                for (int tile = 0; tile < kTiles; ++tile) {
                    for (int i = 0; i < kElements; ++i) {
                        const auto [row, column] = accumulator(other, i);
                        if (row != accumulator(lane, 2 * r).row) continue;
                        const double distance = tile * kB_c + column - (first_row + row);
                        exponents.push_back((scores[tile][other][i] + double(step) * distance + at_none) *
                                            double(factor));
                    }
                }
            }
            const double top = *std::max_element(exponents.begin(), exponents.end());
            double sum = 0;
            for (const double x : exponents) sum += std::exp2(x - top);
            CHECK(std::abs(sums[lane][r] - (top + std::log2(sum))) < 2e-6 * (1 + std::abs(top)));
            CHECK(largest[lane][r] <= top + 1e-5 * (1 + std::abs(top)));
        }
    }
}

}  // namespace

int main() {
    for (const bool exact : {true, false}) {
        for (const float step : {0.f, 2.f, -0.05f, 8.f}) {
            check(0.125f, step, 0.f, 128, exact);
            check(0.125f, step, 5.f, 16000, exact);
        }
        check(1.f, -0.5f, 0.f, 0, exact);
    }
    return report();
}
