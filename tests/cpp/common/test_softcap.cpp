// softcap.cuh: the two forms of tanh against the standard library's in double, and where they meet.
#include <cmath>
#include <limits>

#include "check.h"
#include "common/softcap.cuh"

using namespace flash;

int main() {
    constexpr double bound = 0x1p-20;
    double worst = 0;
    for (int i = -200000; i <= 200000; ++i) {
        const float x = static_cast<float>(std::copysign(std::exp2(std::abs(i) / 8000.0 - 21), i));
        const double exact = std::tanh(static_cast<double>(x));
        const double error = std::fabs(softcap_tanh(x) / exact - 1);
        worst = std::fmax(worst, error);
    }
    CHECK(worst < bound);
    CHECK(worst > 0x1p-25);  // the comparison does compare
    CHECK(softcap_tanh(0.0f) == 0);
    const float infinity = std::numeric_limits<float>::infinity();
    CHECK(softcap_tanh(infinity) == 1 && softcap_tanh(-infinity) == -1);
    CHECK(softcap_tanh(1e30f) == 1 && softcap_tanh(-1e30f) == -1);
    CHECK(std::isnan(softcap_tanh(std::numeric_limits<float>::quiet_NaN())));
    return report();
}
