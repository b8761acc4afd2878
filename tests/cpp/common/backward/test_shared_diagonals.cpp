// Every score of a warpgroup finds the value of its distance, which one thread has computed.
#include <vector>

#include "check.h"
#include "common/ptx.cuh"
// behind what stands in for the device
#include "common/backward/shared_diagonals.cuh"

namespace {

template <int kQueries>
void check() {
    using Diagonals = flash::SharedDiagonals<kQueries>;
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
    for (int key = 0; key < Diagonals::kKeys; ++key) {
        for (int query = 0; query < kQueries; ++query) {
            const uint32_t place = Diagonals::place(key - query);
            CHECK(place < uint32_t(Diagonals::kBytes));
            float found;
            const uint32_t word = flash::load_shared_word(kBegin + place);
            std::memcpy(&found, &word, sizeof found);
            CHECK(found == 1000.0f + key - query);
        }
    }
}

}  // namespace

int main() {
    check<64>();
    check<128>();
    return report();
}
