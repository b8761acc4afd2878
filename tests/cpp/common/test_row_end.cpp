// row_end.cuh: rows with and without keys, sinks, and references too far from 0.
#include <initializer_list>

#include "check.h"
#include "common/row_end.cuh"

using namespace flash;

static bool close(float x, double expected) { return std::fabs(x - expected) <= 1e-6 * std::fabs(expected); }

int main() {
    const float infinity = INFINITY;
    // Two keys of score 3 and one of 2 (base 2), relative to 3.
    const RowEnd some = end_row(3.0f, 2.5f);
    CHECK(close(some.factor, 1 / 2.5) && close(some.lse, std::log(8 + 8 + 4)));
    const RowEnd with_sink = end_row(3.0f, 2.5f, std::log(12.0f));
    CHECK(close(with_sink.factor, 8.0 / 32) && close(with_sink.lse, std::log(32)));

    // Nothing was seen.
    CHECK(end_row(-1e38f, 0.0f).factor == 0 && end_row(-1e38f, 0.0f).lse == -infinity);
    CHECK(end_row(-1e38f, 0.0f, 5.0f).factor == 0 && end_row(-1e38f, 0.0f, 5.0f).lse == 5.0f);
    // Sinks that are no numbers.
    CHECK(end_row(3.0f, 2.5f, infinity).factor == 0 && end_row(3.0f, 2.5f, infinity).lse == infinity);
    CHECK(close(end_row(3.0f, 2.5f, -infinity).factor, 1 / 2.5));
    CHECK(std::isnan(end_row(3.0f, 2.5f, NAN).lse) && std::isnan(end_row(3.0f, 2.5f, NAN).factor));

    // A reference too far from 0, whatever its sum says: 0 means that all P were lost, not that there is no
    // key.
    for (const float exponent : {0x1.01p27f, -0x1.01p27f, 0x1p37f, -0x1p100f, infinity}) {
        for (const float l : {0.0f, 1.0f, infinity}) {
            const float sum = sum_or_nan(l, exponent, false, 0x1p27f);
            CHECK(std::isnan(sum));
            CHECK(std::isnan(end_row(exponent, sum).factor) && std::isnan(end_row(exponent, sum).lse));
            CHECK(std::isnan(end_row(exponent, sum, 1.0f).factor) &&
                  std::isnan(end_row(exponent, sum, 1.0f).lse));
        }
    }
    CHECK(sum_or_nan(2.5f, 0x1p27f, false, 0x1p27f) == 2.5f);
    CHECK(sum_or_nan(0.0f, -FLT_MAX, true, 0x1p27f) == 0);  // the first reference is as far from 0 as can be
    CHECK(std::isnan(sum_or_nan(NAN, 0.0f, false, 0x1p27f)));
    return report();
}
