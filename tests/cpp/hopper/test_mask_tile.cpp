// Scores that a mask of the user's hides are hidden, and no others, whatever a column's part of the mask is.
#include <cmath>

#include "check.h"
#include "common/ptx.cuh"
// behind what stands in for the device
#include "hopper/mask_tile.cuh"

namespace {

bool sees(int row, int64_t column, int seed) { return (row * 31 + column * 17 + seed) % 5 < 2; }

struct Nothing {};  // what each lane asks anew
struct Narrow {
    int column;
};
struct Wide {
    int64_t column;
};
struct TooWide {  // to be handed from lane to lane
    int64_t column, other;
};
int64_t column_of(const auto &value, int column) {
    if constexpr (requires { value.column; }) return value.column;
    return column;
}

// The column's part knows which column it is of.
template <typename Value, int n, int kMostAtATime>
void check(int seed) {
    FakeWarp::run(0, [=] {
        const int lane = FakeWarp::lane();
        float scores[n / 2];
        for (int i = 0; i < n / 2; ++i) scores[i] = float(i);
        const int row = flash::accumulator(lane, 0).row;
        const auto load = [](int column) {
            if constexpr (requires(Value value) { value.column; }) return Value{column};
            return Value{};
        };
        flash::hopper::hide_unseen<n, kMostAtATime>(
            scores, lane, seed < 0, load,
            [=](const Value &value, int column) {
                CHECK(column >= 0 && column < n && column_of(value, column) == column);
                return uint32_t{sees(row, column_of(value, column), seed)} |
                       uint32_t{sees(row + 8, column_of(value, column), seed)} << 1;
            },
            seed % 2 == 0 ? -INFINITY : INFINITY);
        for (int i = 0; i < n / 2; ++i) {
            const auto [of_row, column] = flash::accumulator(lane, i);
            const bool seen = seed >= 0 && sees(of_row, column, seed);
            CHECK(scores[i] == (seen ? float(i) : seed % 2 == 0 ? -INFINITY : INFINITY));
        }
    });
}

template <int n>
void check_width() {
    for (int seed : {0, 1, 2, 3, -1}) {
        check<Nothing, n, 2>(seed);
        check<Nothing, n, 4>(seed);
        check<Narrow, n, 4>(seed);
        check<Wide, n, 4>(seed);
        check<TooWide, n, 4>(seed);
    }
}

}  // namespace

int main() {
    static_assert(flash::hopper::is_shared<Narrow> && flash::hopper::is_shared<Wide>);
    static_assert(!flash::hopper::is_shared<Nothing> && !flash::hopper::is_shared<TooWide>);
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
