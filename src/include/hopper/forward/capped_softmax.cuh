// Exponents of soft-capped scores for a lagged softmax (softcap.cuh).
//
// Scores take a series as long as it holds for them, which ends in the exponent: the cap costs its terms and
// nothing else. Whether it held for all is seen beside the work, like the growth of the reference: the series
// grows with the score, so that none is too large where no exponent is, and the least score is found by an
// integer maximum. A step that met another score says that its reference was outgrown by everything: its
// scores are computed again, and the warp takes the next longer form until its item ends.
#pragma once

#include <climits>

#include "common/softcap.cuh"
#include "hopper/forward/softmax.cuh"

namespace flash::hopper {

inline constexpr int kUnusableStep = INT_MAX;  // as a growth of all lanes; like NaN it is more than any other

// Which form a warp takes: the shortest that was right for all scores of its item so far.
enum class CapForm { SHORT_SERIES, LONG_SERIES, ANY };

template <int kTerms>
struct CappedExponents {
    const TanhSeries<kTerms> &series;
    const float exponent_factor;
    uint32_t least = 0;  // bits of the least score below 0: those of floats below 0 order backwards

    FLASH_DEVICE float of(float s, float offset) const { return fmaf(s, series.slope(s * s), -offset); }
    FLASH_DEVICE void see(float s0, float s1) {
        least = __vimax3_u32(least, __float_as_uint(s0), __float_as_uint(s1));
    }
    // An unusable step leaves the sums as they are.
    template <typename Softmax>
    FLASH_DEVICE void add(Softmax &softmax, float sum0, float sum1) {
        bool unusable = least > __float_as_uint(-series.end);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float room = series.bound - softmax.reference[r] * exponent_factor;
            unusable |= softmax.growth[r] > __float_as_int(fminf(room, kRescalableGrowth));
        }
        if (__any_sync(kAllLanes, unusable)) {
            softmax.growth[0] = kUnusableStep;
        } else {
            softmax.sum[0] += sum0;
            softmax.sum[1] += sum1;
        }
    }
};

}  // namespace flash::hopper
