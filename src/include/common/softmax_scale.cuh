// The numbers by which scores become exponents, for any finite softmax_scale, computed once per launch.
//
//     plain softmax        S := S * score_factor,  P = 2^((S - m) * exponent_factor)      m: row maximum of S
//     optimized_softmax                            P = 2^(S * exponent_factor - m * exponent_factor)
//
// The second form takes the maximum before it scales, which is right for a positive factor only. So
//   * a negative scale negates Q, which is exact, and is then positive;
//   * a zero scale becomes the smallest normal float: every exponent rounds to 0, every P to 1, and a
//     masked score, -inf, still gives P = 0, where -inf * 0 would be NaN.
// m * exponent_factor is rounded, the other product is not: all P of a row share a factor 2^d, where
// |d| <= 2^-24 |m * exponent_factor|. It cancels in O / l; scaled scores beyond 2^20 lose accuracy by it when
// the maximum changes. Beyond largest_exponent P may overflow, or be 0 for all keys of a row: such a row ends
// as NaN (row_end.cuh). The plain form is right there too.
//
// With a soft cap, both forms take S := tanh(S * score_factor), which is softcap_tanh.
#pragma once

#include <cfloat>

#include "common/cuda_utils.cuh"
#include "flash_attention.cuh"

namespace flash {

inline constexpr float kLog2e = 1.44269504088896341f;
inline constexpr float kLn2 = 0.693147180559945309f;

struct SoftmaxScale {
    float score_factor;
    float exponent_factor;
    float lowest;  // lowest_score(exponent_factor)
    bool negate_Q;
};

// The maximum of a row that has seen no key: finite, and so small that no score of a row is below it, yet
// lowest * exponent_factor does not overflow. Scores of -inf, masked or not, then give P = 0 and the first
// finite maximum a rescale by 0, without a special case for (-inf) - (-inf). Scores below it are possible
// only where they overflow as exponents, and count as -inf.
FLASH_HOST_DEVICE constexpr float lowest_score(float exponent_factor) {
    constexpr float margin = 1 - 0x1p-20f;  // the product is rounded
    return exponent_factor > 1 ? -FLT_MAX * margin / exponent_factor : -FLT_MAX;
}

// How far from 0 the reference of a row may be, as an exponent of 2. Of the second form the largest P of a
// row is 2^d, |d| <= 4 up to 2^27 and 32 up to 2^30, in which P of fp16 and of bf16 have room, a lagged
// reference's 2^8 included. The plain form's P are at most 1.
FLASH_HOST_DEVICE constexpr float largest_exponent(DType dtype, bool optimized_softmax) {
    return !optimized_softmax ? FLT_MAX : dtype == DType::FP16 ? 0x1p27f : 0x1p30f;
}

// For scores softcap * tanh(score * softmax_scale / softcap): the cap is a part of the exponent's factor.
// `softcap`: positive; 0 where it was too small for a float, whose scores are all 0 as well.
// `least`: of the exponent's factor.
FLASH_HOST_DEVICE constexpr SoftmaxScale make_capped_softmax_scale(float softmax_scale, float softcap,
                                                                   float least = FLT_MIN) {
    constexpr float largest_cap = 0x1p100f;  // no finite score is near it, and nothing below overflows
    // Not 0, as in make_softmax_scale: a masked score, -inf, has to stay -inf.
    const float cap = softcap < FLT_MIN ? FLT_MIN : softcap < largest_cap ? softcap : largest_cap;
    const double ratio = double(softmax_scale) / cap;
    const double bounded = ratio > FLT_MAX ? FLT_MAX : ratio < -FLT_MAX ? -FLT_MAX : ratio;
    const float factor = cap * kLog2e > least ? cap * kLog2e : least;
    return {static_cast<float>(bounded), factor, lowest_score(factor), false};
}

// `least`: of the exponent's factor, which a scale of 0 becomes.
FLASH_HOST_DEVICE constexpr SoftmaxScale make_softmax_scale(float softmax_scale, bool optimized_softmax,
                                                            float least = FLT_MIN) {
    if (!optimized_softmax) return {softmax_scale, kLog2e, lowest_score(kLog2e), false};
    const float magnitude = softmax_scale < 0 ? -softmax_scale : softmax_scale;
    const float bounded = magnitude < FLT_MAX / 2 ? magnitude * kLog2e : FLT_MAX / 2;
    const float factor = bounded > least ? bounded : least;
    return {1.0f, factor, lowest_score(factor), softmax_scale < 0};
}

}  // namespace flash
