// A lagged softmax of soft-capped scores by a series (softcap.cuh).
//
// The series ends in the exponent: the cap costs its terms and nothing else. It holds for scores up to an
// end; whether it held for all is seen in the squares that it needs anyway, by an integer maximum.
#pragma once

#include <climits>

#include "common/softcap.cuh"
#include "hopper/forward/softmax.cuh"

namespace flash::hopper {

inline constexpr int kUnusableStep = INT_MAX;  // as a growth of all lanes; like NaN it is more than any other
inline constexpr float kLargestSum = 1e36f;    // of a step without growth; more is an overflow of some P

inline constexpr int kShortTerms = 3, kLongTerms = 7;  // of series

// Of two consumers one computes exponentials while the other multiplies, and exponentials are what takes the
// time then: they have to begin early. ptxas computes all series first and leaves the unit of the
// exponentials idle meanwhile. So the series of so many scores begins when a weight this far before it is
// known. That takes registers: wider tiles of head size 256, load warps that need more, and kernels without a
// causal mask would spill.
inline constexpr int kSeriesGroup = 8, kSeriesLag = 16;
inline constexpr int kOrderedRegisters = 176;  // of O, S and P at most
template <typename Kernel>
inline constexpr bool kOrdersSeries =
    Kernel::n_consumers == 2 && Kernel::traits.causal && !Kernel::warp_loads && !Kernel::traits.planned &&
    Kernel::d_head_v / 2 + 3 * Kernel::B_c / 4 <= kOrderedRegisters;

// Which form a warp takes: the shortest that was right for all scores of its item so far.
enum class CapForm { SHORT_SERIES, LONG_SERIES, ANY };

// Whether steps look for growth. All scores of the short series lie so close together that P of bfloat16 and
// its sums have room whatever the reference is: P <= 2^(2 * 10 log2(e)), 2^29.
template <typename Kernel, int kTerms>
inline constexpr bool kSeesGrowth = kTerms != kShortTerms || Kernel::dtype != DType::BF16;
static_assert(kShortTanhSeriesScore <= 10.0f);

// What a thread's part of a step gives beside P.
struct SeriesStep {
    float sum[2];
    uint32_t largest_square;  // bits of it, which order as it does

    template <int kTerms>
    FLASH_DEVICE bool out_of_range(const TanhSeries<kTerms> &series) const {
        return largest_square > __float_as_uint(series.end * series.end);
    }
};

// S -> P in place, with the reference of the tile before; sets `growth`. The sums stay as they are. The short
// series is one of scores; the long one, whose terms would lose digits, of score_factor times these.
// kOrdered: see kOrdersSeries.
template <bool kGrowth, bool kOrdered, int B_c, int kTerms>
FLASH_DEVICE SeriesStep series_step(OnlineSoftmax<B_c> &softmax, float (&rmem_S)[B_c / 2], float score_factor,
                                    float exponent_factor, const TanhSeries<kTerms> &series) {
    const float offset[2] = {softmax.reference[0] * exponent_factor, softmax.reference[1] * exponent_factor};
    float sum[4] = {0.f, 0.f, 0.f, 0.f};  // two chains of additions a row
    uint32_t largest = 0;
    const uint32_t zero = __float_as_uint(softmax.sum[0]) >> 31;  // which the compiler can't know
    TanhSeries<kTerms> ordered = series;
    softmax.growth[0] = softmax.growth[1] = 0;
#pragma unroll
    for (int i = 0; i < B_c / 2; i += 4) {
        float (&s)[4] = reinterpret_cast<float (&)[4]>(rmem_S[i]);
        float square[4];
        if (kOrdered && i % kSeriesGroup == 0 && i >= kSeriesLag) {
            float &term = ordered.terms[kTerms - 2];  // the first that is added
            const uint32_t weight = __float_as_uint(rmem_S[i - kSeriesLag]);
            term = __uint_as_float(__float_as_uint(series.terms[kTerms - 2]) ^ (weight & zero));
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (kTerms != kShortTerms) s[j] *= score_factor;
            square[j] = s[j] * s[j];
        }
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            largest = __vimax3_u32(largest, __float_as_uint(square[j]), __float_as_uint(square[j + 1]));
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) s[j] = fmaf(s[j], ordered.slope(square[j]), -offset[j / 2]);
        if constexpr (kGrowth) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                softmax.growth[r] =
                    __vimax3_s32(softmax.growth[r], __float_as_int(s[2 * r]), __float_as_int(s[2 * r + 1]));
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            s[j] = exp2_approx(s[j]);
            sum[j] += s[j];
        }
    }
    return {{sum[0] + sum[1], sum[2] + sum[3]}, largest};
}

}  // namespace flash::hopper
