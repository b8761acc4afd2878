// tanh for soft-capped scores, error below 2^-20.
//
// A capped score, softcap * tanh(x), stands in an exponent: its absolute error is the relative error of P
// and the error of the LSE. tanh.approx.f32 is off by up to 2^-11 of its value: with the usual caps, 30
// to 50, that is up to 0.024 in the score, 24 times what the LSE may be off, and more than fp16 scores
// are rounded by. So tanh is made of two other forms,
//
//     tanh x = x (c1 + x^2 (c3 + x^2 (c5 + …)))      error below 2^-20 of it up to |x| = 0.75, of five terms,
//                                                    up to 1.25 of seven
//     tanh x = 1 - 2 / (2^(2 log2e x) + 1)           error below 2^-22, absolute
//
// The second form cancels for small x, and a large cap leaves x small and multiplies what it loses. It also
// takes two operations of the unit that computes the exponentials of the softmax, which kernels with a soft
// cap wait for. So a warp looks at all scores of its tile, and takes the first form alone where that is right
// for all of them: caps are well above usual scores.
#pragma once

#include "common/cuda_utils.cuh"
#include "common/softmax_scale.cuh"

#if defined(__CUDACC__)
#include "common/ptx.cuh"
#else
#include <cmath>
#endif

namespace flash {

inline constexpr float kShortTanhSeriesScore = 10.0f;

// Up to which x a series of so many terms holds.
template <int kTerms>
FLASH_HOST_DEVICE constexpr float tanh_series_end() {
    static_assert(kTerms == 3 || kTerms == 5 || kTerms == 7, "a series of tanh has 3, 5 or 7 terms");
    return kTerms == 3 ? 0.3f : kTerms == 5 ? 0.75f : 1.25f;
}

// value_factor * tanh(factor * s), of positive factors, as an odd polynomial of s. Of those of its degree
// tanh's has the least relative error on its range: below 2^-20 with five and seven terms and 2^-19 with
// three, whose absolute error is below 2^-21 of value_factor. Of three terms the range also ends at scores of
// 10: they lie close together (capped_softmax.cuh).
template <int kTerms>
struct TanhSeries {
    float terms[kTerms];
    float end;  // it holds for s within it of 0; 0: it can't be used

    // Its value by s, for square = s^2.
    FLASH_HOST_DEVICE constexpr float slope(float square) const {
        float sum = terms[kTerms - 1];
#pragma unroll
        for (int i = kTerms - 2; i >= 0; --i) sum = square * sum + terms[i];
        return sum;
    }
};

template <int kTerms>
FLASH_HOST_DEVICE constexpr TanhSeries<kTerms> tanh_series_of(double factor, double value_factor) {
    constexpr double kCoefficients[3][7] = {
        {0.9999988388477394, -0.33310021601914014, 0.12633946011698383},
        {0.999999463558197, -0.3332825005054474, 0.13258983194828033, -0.05005628988146782,
         0.012929621152579784},
        {0.999999376183373, -0.33329339625278953, 0.1329064818160998, -0.05220544203201064,
         0.0182291228160526, -0.004626905351731568, 0.0005844940186085948}};
    constexpr double kLeastTerm = 0x1p-125,
                     kLargestTerm = 0x1p100;  // they don't overflow, and lose no digits
    double x = tanh_series_end<kTerms>();
    if (kTerms == 3) {
        const double end = kShortTanhSeriesScore * kLog2e / value_factor;
        x = end < x ? end : x;
    }
    TanhSeries<kTerms> series{};
    double power = factor * value_factor;
    for (int i = 0; i < kTerms; ++i) {
        const double term = kCoefficients[kTerms / 2 - 1][i] * power;
        const double size = term < 0 ? -term : term;
        if (!(size > kLeastTerm && size < kLargestTerm)) return TanhSeries<kTerms>{};
        series.terms[i] = static_cast<float>(term);
        power *= factor * factor;
    }
    series.end = static_cast<float>(x / factor);
    return series;
}

template <int kTerms>
FLASH_HOST_DEVICE float tanh_series(float x) {
    constexpr TanhSeries<kTerms> series = tanh_series_of<kTerms>(1, 1);
    return x * series.slope(x * x);
}

FLASH_HOST_DEVICE float tanh_exponential(float x) {
#if defined(__CUDA_ARCH__)
    const float inverse = reciprocal_approx(exp2_approx(x * (2 * kLog2e)) + 1.0f);
#else
    const float inverse = 1.0f / (std::exp2(x * (2 * kLog2e)) + 1.0f);
#endif
    return 1.0f - 2.0f * inverse;
}

// -1 and 1 at the infinities, NaN stays NaN.
FLASH_HOST_DEVICE float softcap_tanh(float x) {
    return (x < 0 ? -x : x) < tanh_series_end<5>() ? tanh_series<5>(x) : tanh_exponential(x);
}

#if defined(__CUDACC__)
// tanh_exponential is off by up to 2^-22: scores under smaller caps by less than 2^-12.
inline constexpr float kLargeCap = 1024;

// Whether no score of the warp's tile is further from 0 than `end`. NaN counts as small: it stays NaN.
template <int n>
FLASH_DEVICE bool scores_are_small(const float (&scores)[n], float end) {
    float even = 0.f, odd = 0.f;
#pragma unroll
    for (int i = 0; i < n; i += 2) {
        even = fmaxf(even, fabsf(scores[i]));
        odd = fmaxf(odd, fabsf(scores[i + 1]));
    }
    return !__any_sync(kAllLanes, fmaxf(even, odd) > end);
}

// A thread's scores S become tanh(score_factor S), whatever they are. exponent_factor: softcap * log2(e).
template <int n>
FLASH_DEVICE void cap_any_scores(float (&scores)[n], float score_factor, float exponent_factor) {
    if (exponent_factor > kLargeCap * kLog2e) {
#pragma unroll
        for (int i = 0; i < n; ++i) scores[i] = softcap_tanh(scores[i] * score_factor);
    } else {
#pragma unroll
        for (int i = 0; i < n; ++i) scores[i] = tanh_exponential(scores[i] * score_factor);
    }
}

// The same of a warp's tile, by a series alone where all are small; tells whether they were.
template <int kTerms, int n>
FLASH_DEVICE bool cap_scores(float (&scores)[n], float score_factor, float exponent_factor) {
#pragma unroll
    for (int i = 0; i < n; ++i) scores[i] *= score_factor;
    const bool small = scores_are_small(scores, tanh_series_end<kTerms>());
    if (small) {
#pragma unroll
        for (int i = 0; i < n; ++i) scores[i] = tanh_series<kTerms>(scores[i]);
    } else {
        cap_any_scores(scores, 1.0f, exponent_factor);
    }
    return small;
}
#endif

}  // namespace flash
