// Soft-capped scores: tanh(score_factor S), its weight P = 2^(factor tanh - LSE), and the derivative of the cap.
#pragma once

#include "common/softcap.cuh"
#include "common/softmax_scale.cuh"

namespace flash::hopper {

// tanh_exponential is off by up to 2^-22: scores under smaller caps by less than 2^-12.
inline constexpr float kLargeBackwardCap = 1024;

// What stands for a score that a mask hides: no tanh is so large.
inline constexpr float kHiddenTanh = 2;

template <int n>
FLASH_DEVICE void cap_scores(float (&scores)[n], float score_factor, float exponent_factor) {
    if (exponent_factor > kLargeBackwardCap * kLog2e) {
#pragma unroll
        for (int i = 0; i < n; ++i) scores[i] = softcap_tanh(scores[i] * score_factor);
    } else {
#pragma unroll
        for (int i = 0; i < n; ++i) scores[i] = tanh_exponential(scores[i] * score_factor);
    }
}

// P of a capped score, times the derivative of the cap.
FLASH_DEVICE float capped_probability(float tanh, float exponent_factor, float lse_log2) {
    const float p = exp2_approx(fmaf(tanh, exponent_factor, -lse_log2)) * (1.f - tanh * tanh);
    return tanh == kHiddenTanh ? 0.f : p;
}

}  // namespace flash::hopper
