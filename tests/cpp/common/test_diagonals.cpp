// Every score of a warp finds the value of its column - row, computed by the thread or handed over.
#include "check.h"
#include "common/ptx.cuh"
// behind what stands in for the device
#include "common/diagonals.cuh"

namespace {

template <int kSquares, bool kShared>
void check() {
    static int n_computed;
    n_computed = 0;
    FakeWarp::run(0, [] {
        const int lane = FakeWarp::lane();
        flash::Diagonals<kSquares, kShared> diagonals;
        diagonals.find(lane, [](int distance) {
            ++n_computed;
            return 1000.0f + distance;
        });
        for (int n = 0; n < kSquares; ++n) {
            for (int i = 0; i < 4; ++i) {
                const auto [row, column] = flash::accumulator(lane, 4 * n + i);
                CHECK(diagonals.value(i / 2, n, i % 2) == 1000.0f + column - row);
            }
        }
    });
    CHECK(!kShared || n_computed == 32 * ((8 * kSquares + 15 + 31) / 32));
}

}  // namespace

int main() {
    check<2, false>();
    check<8, false>();
    check<2, true>();
    check<4, true>();
    check<6, true>();
    check<8, true>();
    check<10, true>();
    check<16, true>();
    check<22, true>();
    check<32, true>();
    return report();
}
