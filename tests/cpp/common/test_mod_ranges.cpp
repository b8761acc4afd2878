// Bounds of whole numbers and truths, against every pair of numbers within the bounds.
#include <initializer_list>

#include "check.h"
#include "common/mod_ranges.cuh"

using flash::mods::Range;
using flash::mods::Truth;

namespace {

constexpr int kLeast = -3, kMost = 4;

bool holds(Range<int> bounds, int x) { return bounds.low <= x && x <= bounds.high; }
bool holds(Truth bounds, bool x) { return (!bounds.low || x) && (bounds.high || !x); }

template <typename F>
void for_each_range(F f) {
    for (int low = kLeast; low <= kMost; ++low)
        for (int high = low; high <= kMost; ++high) f(Range<int>{low, high});
}

void check_numbers() {
    namespace mods = flash::mods;
    for_each_range([](Range<int> a) {
        for (int x = a.low; x <= a.high; ++x) {
            CHECK(holds(mods::negative(a), -x));
            CHECK(holds(mods::absolute(a), x < 0 ? -x : x));
            for (int by = 1; by <= 5; ++by) {
                const int quotient = (x - (x % by + by) % by) / by;
                CHECK(holds(mods::quotient(a, by), quotient));
                CHECK(holds(mods::rest(a, by), x - quotient * by));
            }
            CHECK(holds(mods::narrow(mods::wide(a)), x));
        }
        for_each_range([&](Range<int> b) {
            for (int x = a.low; x <= a.high; ++x)
                for (int y = b.low; y <= b.high; ++y) {
                    CHECK(holds(mods::add(a, b), x + y));
                    CHECK(holds(mods::sub(a, b), x - y));
                    CHECK(holds(mods::mul(a, b), x * y));
                    CHECK(holds(mods::minimum(a, b), x < y ? x : y));
                    CHECK(holds(mods::maximum(a, b), x > y ? x : y));
                    CHECK(holds(mods::less(a, b), x < y));
                    CHECK(holds(mods::at_most(a, b), x <= y));
                    CHECK(holds(mods::equal(a, b), x == y));
                }
        });
    });
    // They are no wider than they must be.
    CHECK(mods::mul(Range<int>{-3, 2}, Range<int>{-1, 4}).low == -12);
    CHECK(mods::mul(Range<int>{-3, 2}, Range<int>{-1, 4}).high == 8);
    CHECK(mods::rest(Range<int>{9, 11}, 8).low == 1 && mods::rest(Range<int>{9, 11}, 8).high == 3);
    CHECK(mods::less(Range<int>{0, 3}, Range<int>{4, 5}).low);
    CHECK(!mods::less(Range<int>{4, 5}, Range<int>{0, 4}).high);
}

void check_truths() {
    namespace mods = flash::mods;
    const Truth truths[] = {{false, false}, {false, true}, {true, true}};
    for (const Truth a : truths)
        for (const Truth b : truths)
            for (const bool x : {false, true})
                for (const bool y : {false, true}) {
                    if (!holds(a, x) || !holds(b, y)) continue;
                    CHECK(holds(mods::neither(a), !x));
                    CHECK(holds(mods::both(a, b), x && y));
                    CHECK(holds(mods::either(a, b), x || y));
                    CHECK(holds(mods::differing(a, b), x != y));
                    CHECK(holds(mods::number(a), x ? 1 : 0));
                    CHECK(holds(mods::chosen(a, b, mods::neither(b)), x ? y : !y));
                    CHECK(holds(mods::chosen(a, Range<int>{1, 2}, Range<int>{5, 6}), x ? 2 : 5));
                }
}

}  // namespace

int main() {
    check_numbers();
    check_truths();
    return report();
}
