// Every score of a tile finds the value of its distance, which one thread has computed.
#include <vector>

#include "check.h"
#include "common/ptx.cuh"
// behind what stands in for the device
#include "common/fragments.cuh"
#include "common/shared_diagonals.cuh"

namespace {

template <int kKeys, int kQueries>
void check() {
    using Diagonals = flash::SharedDiagonals<kKeys, kQueries>;
    constexpr uint32_t kBegin = 256;
    static std::vector<int> computed;
    computed.assign(Diagonals::kValues, 0);
    for (int thread = 0; thread < Diagonals::kThreads; ++thread) {
        Diagonals::find(kBegin, thread, [](int distance) {
            ++computed.at(distance - Diagonals::kLowest);
            return 1000.0f + distance;
        });
    }
    for (const int times : computed) CHECK(times == 1);
    for (int key = 0; key < kKeys; ++key) {
        for (int query = 0; query < kQueries; ++query) {
            const uint32_t place = Diagonals::place(key - query);
            CHECK(place < uint32_t(Diagonals::kBytes));
            float found;
            const uint32_t word = flash::load_shared_word(kBegin + place);
            std::memcpy(&found, &word, sizeof found);
            CHECK(found == 1000.0f + key - query);
        }
    }
    for (int warp_row = 0; warp_row < kQueries; warp_row += 16) {
        for (int lane = 0; lane < 32; ++lane) {
            const auto [row, column] = flash::accumulator(lane, 0);
            float values[kKeys / 2];
            Diagonals::read(values, kBegin, warp_row + row, column);
            for (int i = 0; i < kKeys / 2; ++i) {
                const auto [query, key] = flash::accumulator(lane, i);
                CHECK(values[i] == 1000.0f + key - (warp_row + query));
            }
        }
    }
}

}  // namespace

int main() {
    check<64, 64>();
    check<64, 128>();
    check<64, 256>();
    check<80, 128>();
    check<128, 64>();
    check<128, 128>();
    return report();
}
