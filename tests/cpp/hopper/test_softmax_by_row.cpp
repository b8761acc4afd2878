// The softmax that treats each row by itself, on a warp of fibers: a row has the same bits whichever step
// takes its tiles, whatever the rows beside it hold, and from whichever tile on that shows it no key. And
// chunks of keys: joined by one thread block as by the kernel that joins parts. And it is about as exact as
// the softmax that treats the rows of a warp alike.
#include <cuda_runtime.h>

#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "common/chunk_combine.cuh"
#include "hopper/forward/softmax.cuh"

using namespace flash;

namespace {

constexpr int kB_c = 32, kElements = kB_c / 2, kTiles = 6;
std::mt19937 random_bits{5};
float normal(float scale) { return std::normal_distribution<float>(0.f, scale)(random_bits); }
int between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_bits); }

// What a thread is left with, bit for bit.
struct Outcome {
    float sum[2], reference[2], rescale[kTiles][2], p[kTiles][kElements];
};
using Scores = std::vector<std::array<std::array<float, kElements>, 32>>;  // of each tile and lane

// The tiles of a warp, as a consumer takes them: `masked(tile)` says which step does. `exact`: the first is
// taken as an item's and a chunk's first is.
template <typename Masked>
std::array<Outcome, 32> run(const Scores &scores, float factor, const Masked &masked, bool exact = false) {
    std::array<Outcome, 32> outcomes{};
    const float lowest = lowest_score(factor);
    FakeWarp::run(0, [&] {
        hopper::OnlineSoftmax<kB_c> softmax;
        Outcome &own = outcomes[threadIdx.x];
        for (int r = 0; r < 2; ++r) {  // nothing has been seen
            softmax.reference[r] = lowest;
            softmax.sum[r] = 0.f;
        }
        for (int tile = 0; tile < kTiles; ++tile) {
            float s[kElements];
            std::copy(scores[tile][threadIdx.x].begin(), scores[tile][threadIdx.x].end(), s);
            softmax.rescale[0] = softmax.rescale[1] = 1.f;
            if (exact && tile == 0) {
                softmax.exact_step<true>(s, factor, lowest);
            } else if (masked(tile)) {
                softmax.row_step(s, factor, 1 / factor, lowest);
            } else {
                const float before[2] = {softmax.sum[0], softmax.sum[1]};
                softmax.lagged_step(s, factor);
                if (softmax.warp_outgrew(hopper::kToleratedGrowthByRow)) {
                    if (softmax.warp_outgrew(hopper::kRescalableGrowth)) {
                        softmax.sum[0] = before[0];
                        softmax.sum[1] = before[1];
                        std::copy(scores[tile][threadIdx.x].begin(), scores[tile][threadIdx.x].end(), s);
                        softmax.row_step(s, factor, 1 / factor, lowest);
                    } else {
                        softmax.adopt_growth_of_rows(s, factor, 1 / factor);
                    }
                }
            }
            for (int r = 0; r < 2; ++r) own.rescale[tile][r] = softmax.rescale[r];
            std::copy(s, s + kElements, own.p[tile]);
        }
        for (int r = 0; r < 2; ++r) {
            own.sum[r] = softmax.sum[r];
            own.reference[r] = softmax.reference[r];
        }
    });
    return outcomes;
}

// Rows r of two lanes' outcomes.
bool same_row(const Outcome &a, const Outcome &b, int r) {
    bool same = a.sum[r] == b.sum[r] && a.reference[r] == b.reference[r];
    for (int tile = 0; tile < kTiles; ++tile) {
        same = same && (tile == 0 || a.rescale[tile][r] == b.rescale[tile][r]);  // before tile 0 O is 0
        for (int i = 2 * r; i < kElements; i += 4) {
            same = same && a.p[tile][i] == b.p[tile][i] && a.p[tile][i + 1] == b.p[tile][i + 1];
        }
    }
    return same;
}

Scores random_scores(float scale, int n_hidden) {
    Scores scores(kTiles);
    for (int tile = 0; tile < kTiles; ++tile) {
        for (auto &lane : scores[tile]) {
            for (float &s : lane) s = tile < n_hidden ? -INFINITY : normal(scale);
        }
    }
    return scores;
}

void check_steps() {
    for (int i = 0; i < 300; ++i) {
        const float scale = std::vector<float>{0.5f, 3.f, 20.f, 120.f, 500.f}[i % 5];
        const float factor = between(0, 1) ? 1.f : 0.1275f;
        const int hidden = between(0, 3);
        const Scores scores = random_scores(scale, hidden);
        const auto by_rows = run(scores, factor, [](int) { return true; });
        const auto lagged = run(scores, factor, [&](int tile) { return tile <= hidden; });
        const auto mixed = run(scores, factor, [&](int tile) { return tile <= hidden || tile % 2; });
        const auto exact = run(scores, factor, [&](int tile) { return tile <= hidden; }, true);
        // Other rows beside quad 3's, of which some outgrow their references by far.
        Scores others = random_scores(std::vector<float>{1.f, 800.f}[i % 2], between(0, 2));
        for (int tile = 0; tile < kTiles; ++tile) {
            for (int lane = 12; lane < 16; ++lane) others[tile][lane] = scores[tile][lane];
        }
        const auto beside = run(others, factor, [&](int tile) { return tile <= hidden; });
        for (int lane = 0; lane < 32; ++lane) {
            for (int r = 0; r < 2; ++r) {
                CHECK(same_row(by_rows[lane], lagged[lane], r) && same_row(by_rows[lane], mixed[lane], r));
                CHECK(same_row(by_rows[lane], exact[lane], r));
                if (lane / 4 == 3) CHECK(same_row(by_rows[lane], beside[lane], r));
            }
        }
        // Tiles that show a row nothing leave it as it is.
        Scores fewer(scores.begin() + hidden, scores.end());
        fewer.resize(kTiles, scores[0]);
        for (int tile = kTiles - hidden; tile < kTiles; ++tile) {
            for (auto &lane : fewer[tile]) lane.fill(-INFINITY);
        }
        const auto without = run(fewer, factor, [](int) { return true; });
        for (int lane = 0; lane < 32; ++lane) {
            for (int r = 0; r < 2; ++r) {
                CHECK(without[lane].sum[r] == by_rows[lane].sum[r]);
                CHECK(without[lane].reference[r] == by_rows[lane].reference[r]);
            }
        }
    }
}

// ---------------------------------------------------------------- how exact
constexpr int kManyTiles = 39, kParts = 3;

// A thread's share of a row of a part: exact, and with the P of the steps.
struct Share {
    double l = 0, o = 0, exact_l = 0, exact_o = 0;
};

// The rows of a warp whose scores are as far apart as those of a peaked softmax, in parts of their own, as
// where keys are shared among thread blocks. The squared error of O, with P rounded as the products take it.
double squared_error(bool by_row, int seed) {
    std::mt19937 bits(seed);
    std::normal_distribution<float> of_scores(0.f, 43.f), of_values(0.f, 1.f);
    std::vector<float> scores(kManyTiles * 32 * kElements), values(kManyTiles * kB_c);
    for (float &s : scores) s = of_scores(bits);
    for (float &v : values) v = of_values(bits);
    const float lowest = lowest_score(1.f);
    std::vector<Share> shares(32 * 2);
    std::vector<std::array<double, kParts>> l(64), o(64), reference(64);
    FakeWarp::run(0, [&] {
        const int lane = threadIdx.x;
        hopper::OnlineSoftmax<kB_c> softmax;
        for (int tile = 0; tile < kManyTiles; ++tile) {
            const float *given = &scores[(tile * 32 + lane) * kElements];
            float s[kElements];
            std::copy(given, given + kElements, s);
            const int part = tile / (kManyTiles / kParts);
            softmax.rescale[0] = softmax.rescale[1] = 1.f;
            if (tile % (kManyTiles / kParts) == 0) {
                softmax.exact_step<true>(s, 1.f, lowest);
            } else if (by_row) {
                softmax.row_step(s, 1.f, 1.f, lowest);
            } else {
                softmax.lagged_step(s, 1.f);
                if (softmax.warp_outgrew(hopper::kRescalableGrowth)) {
                    softmax.undo_lagged_step(s);
                    std::copy(given, given + kElements, s);
                    softmax.exact_step<false>(s, 1.f, lowest);
                } else if (softmax.warp_outgrew(hopper::kToleratedGrowth)) {
                    softmax.adopt_growth(s, 1.f, 1.f);
                }
            }
            for (int r = 0; r < 2; ++r) {
                const int own = 2 * lane + r;
                o[own][part] *= softmax.rescale[r];
                for (int i = 2 * r; i < kElements; i += 4) {
                    const uint32_t rounded = pack<DType::BF16>(s[i], s[i + 1]);
                    const float *v = &values[tile * kB_c + i / 4 * 8 + lane % 4 * 2];
                    o[own][part] += __int_as_float(int(rounded << 16)) * double(v[0]) +
                                    __int_as_float(int(rounded & 0xffff0000)) * double(v[1]);
                    for (int j = 0; j < 2; ++j) {
                        const double weight = std::exp2(double(given[i + j]));
                        shares[own].exact_l += weight;
                        shares[own].exact_o += weight * v[j];
                    }
                }
                l[own][part] = softmax.sum[r];
                reference[own][part] = softmax.reference[r];
            }
        }
    });
    double error = 0;
    for (int row = 0; row < 16; ++row) {
        Share whole;
        for (int lane = row / 2 * 4; lane < row / 2 * 4 + 4; ++lane) {
            const int own = 2 * lane + row % 2;
            for (int part = 0; part < kParts; ++part) {
                whole.l += l[own][part] * std::exp2(reference[own][part]);
                whole.o += o[own][part] * std::exp2(reference[own][part]);
            }
            whole.exact_l += shares[own].exact_l;
            whole.exact_o += shares[own].exact_o;
        }
        const double off = whole.o / whole.l - whole.exact_o / whole.exact_l;
        error += off * off;
    }
    return error;
}

void check_errors() {
    double by_row = 0, by_warp = 0;
    for (int i = 0; i < 60; ++i) {
        by_row += squared_error(true, i);
        by_warp += squared_error(false, i);
    }
    CHECK(std::sqrt(by_row) <= 1.05 * std::sqrt(by_warp));
}

// ---------------------------------------------------------------- chunks
void check_chunks() {
    constexpr float kUnseen = -1e30f;
    for (int i = 0; i < 500; ++i) {
        const int n = between(1, 30);
        std::vector<float2> pairs(n);
        std::vector<float> o(4 * n);
        for (int part = 0; part < n; ++part) {
            const bool sees = between(0, 3) > 0;
            pairs[part] = sees ? make_float2(normal(i % 2 ? 5.f : 200.f), 1.f + between(0, 1000))
                               : make_float2(kUnseen, 0.f);
            for (int c = 0; c < 4; ++c) o[4 * part + c] = sees ? normal(30.f) : 0.f;
        }
        // As a thread block does that takes all of them: what it has kept, then the next.
        float exponent = pairs[n - 1].x, sum = pairs[n - 1].y, kept[4];
        std::copy(o.end() - 4, o.end(), kept);
        for (int part = n - 2; part >= 0; --part) {
            const ChunkWeights weights(exponent, pairs[part].x);
            exponent = weights.exponent;
            sum = weights.join(sum, pairs[part].y);
            for (int c = 0; c < 4; ++c) kept[c] = weights.join(kept[c], o[4 * part + c]);
        }
        JoinedChunks joined(kUnseen);
        joined.take(pairs.data(), o.data(), n, 1, 4, true);
        CHECK(joined.exponent == exponent && joined.sum == sum);
        CHECK(joined.o.x == kept[0] && joined.o.y == kept[1] && joined.o.z == kept[2] &&
              joined.o.w == kept[3]);
        double largest = kUnseen, total = 0;
        for (const float2 &pair : pairs) largest = std::max(largest, double(pair.x));
        for (const float2 &pair : pairs) total += pair.y * std::exp2(pair.x - largest);
        CHECK(std::abs(sum - total) <= 1e-5 * total && exponent == float(largest));
    }
}

}  // namespace

int main() {
    check_steps();
    check_errors();
    check_chunks();
    return report();
}
