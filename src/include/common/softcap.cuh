// tanh for soft-capped scores, relative error below 2^-20.
//
// A capped score, softcap * tanh(x), stands in an exponent: its absolute error is the relative error of P
// and the error of the LSE. tanh.approx.f32 is off by up to 2^-11 of its value: with the usual caps, 30
// to 50, that is up to 0.024 in the score, 24 times what the LSE may be off, and more than fp16 scores
// are rounded by. So tanh is made of two other approximate functions,
//
//     tanh x = 1 - 2 / (2^(2 log2e x) + 1)            error below 2^-22, absolute
//     tanh x = x + x^3 (c3 + x^2 (c5 + c7 x^2 + …))    for small x, where the first form cancels
//
// the second of them because a large cap leaves x small and multiplies what it loses.
#pragma once

#include "common/cuda_utils.cuh"
#include "common/softmax_scale.cuh"

#if defined(__CUDACC__)
#include "common/ptx.cuh"
#else
#include <cmath>
#endif

namespace flash {

inline constexpr float kTanhSeriesEnd = 0.4f;

// The odd polynomial with the least relative error on |x| <= kTanhSeriesEnd.
FLASH_HOST_DEVICE float tanh_series(float x) {
    const float y = x * x;
    return x + x * y * (-0.33331883f + y * (0.13277629f + y * -0.047794215f));
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
    return (x < 0 ? -x : x) < kTanhSeriesEnd ? tanh_series(x) : tanh_exponential(x);
}

}  // namespace flash
