// softcap.cuh: the two forms of tanh against the standard library's in double, and where they meet.
#include <cmath>
#include <initializer_list>
#include <limits>

#include "check.h"
#include "common/softcap.cuh"

using namespace flash;

// The series of a cap, right up to its end.
template <int kTerms>
void check_series(double scale, double softcap, double relative) {
    const double factor = scale / softcap;
    const TanhSeries<kTerms> series = tanh_series_of<kTerms>(factor, softcap * kLog2e);
    CHECK(series.end > 0);
    double worst = 0, worst_score = 0;
    for (int i = -6000; i <= 6000; ++i) {
        const float s = static_cast<float>(i / 6000.0 * series.end);
        const double value = s * series.slope(s * s);
        const double exact = softcap * std::tanh(s * factor);
        if (i != 0) worst = std::fmax(worst, std::fabs(value * kLn2 / exact - 1));
        worst_score = std::fmax(worst_score, std::fabs(value * kLn2 - exact));
    }
    CHECK(worst < relative);
    CHECK(worst > 0x1p-25);  // the comparison does compare
    CHECK(worst_score < 0x1p-20 * softcap);
    if (kTerms == 3) CHECK(worst_score < 0x1p-15);
    if (kTerms == 3) CHECK(series.end * scale <= 10.001);
}

int main() {
    for (const double softcap : {0.5, 5.0, 15.0, 30.0, 50.0, 1000.0}) {
        for (const double scale : {1.0, 0.125, 0.0884, 0.0625}) {
            check_series<5>(scale, softcap, 0x1p-20);
            check_series<3>(scale, softcap, 0x1p-19);
        }
        check_series<7>(softcap, softcap, 0x1p-20);  // of scores that were scaled before
    }
    CHECK(std::fabs(tanh_series_of<5>(0.125, 1).end - 0.75 / 0.125) < 1e-5);
    CHECK(std::fabs(tanh_series_of<7>(1, kLog2e).end - 1.25) < 1e-6);
    CHECK(std::fabs(tanh_series_of<3>(0.125, kLog2e).end - 0.3 / 0.125) < 1e-5);
    CHECK(std::fabs(tanh_series_of<3>(0.01, 100 * kLog2e).end - kShortTanhSeriesScore / 1.0) < 1e-4);
    // Where terms would overflow or lose digits there is none.
    for (const double factor : {0.0, 1e-12, 1e12}) CHECK(tanh_series_of<5>(factor, 1).end == 0);
    constexpr double bound = 0x1p-20;
    double worst = 0, worst_exponential = 0;
    for (int i = -200000; i <= 200000; ++i) {
        const float x = static_cast<float>(std::copysign(std::exp2(std::abs(i) / 8000.0 - 21), i));
        const double exact = std::tanh(static_cast<double>(x));
        const double error = std::fabs(softcap_tanh(x) / exact - 1);
        worst = std::fmax(worst, error);
        worst_exponential = std::fmax(worst_exponential, std::fabs(tanh_exponential(x) - exact));
    }
    CHECK(worst < bound);
    CHECK(worst_exponential < 0x1p-22);
    CHECK(worst > 0x1p-25);  // the comparison does compare
    CHECK(softcap_tanh(0.0f) == 0);
    const float infinity = std::numeric_limits<float>::infinity();
    CHECK(softcap_tanh(infinity) == 1 && softcap_tanh(-infinity) == -1);
    CHECK(softcap_tanh(1e30f) == 1 && softcap_tanh(-1e30f) == -1);
    CHECK(std::isnan(softcap_tanh(std::numeric_limits<float>::quiet_NaN())));
    return report();
}
