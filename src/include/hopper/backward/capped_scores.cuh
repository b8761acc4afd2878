// Soft-capped scores: tanh(score_factor S). The cap is a part of the exponent's factor.
#pragma once

#include "common/softcap.cuh"
#include "common/softmax_scale.cuh"

namespace flash::hopper {

// tanh_exponential is off by up to 2^-22: scores under smaller caps by less than 2^-12.
inline constexpr float kLargeBackwardCap = 1024;

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

}  // namespace flash::hopper
