// Rows and pages: the division by multiplication is the division, at every size and at the bounds.
#include "check.h"
#include "common/page_table.cuh"

using namespace flash;

int main() {
    static_assert(PageSize::of(16).place(35).entry == 2 && PageSize::of(16).place(35).row == 3);
    const int sizes[] = {1,      2, 3, 7, 16, 48, 64, 80, 112, 128, 256, 1000, 65536, 1 << 29, (1 << 30) - 1,
                         1 << 30};
    for (const int size : sizes) {
        const PageSize pages = PageSize::of(size);
        const auto check = [&](int64_t row) {
            if (row < 0 || row > INT32_MAX) return;
            const PagePlace place = pages.place(static_cast<int>(row));
            CHECK(place.entry == row / size && place.row == row % size);
        };
        for (int64_t row = 0; row < 5000; ++row) check(row);
        for (int64_t row = INT32_MAX; row > INT32_MAX - 5000; --row) check(row);
        // Around the multiples, where a quotient that is too large would show first.
        const int64_t last = INT32_MAX / size, step = last / 20000 + 1;
        for (int64_t entry = 1; entry <= last; entry += step) {
            for (int64_t row = entry * size - 2; row <= entry * size + 1; ++row) check(row);
        }
    }
    return report();
}
