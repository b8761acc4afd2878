// The end of a row of the softmax: what its O is multiplied by, and its log-sum-exp.
//
// A row has a reference, of which `exponent` is the exponent of 2, and l, the sum of its P = 2^(x -
// exponent):
//
//     O / l,     lse = ln2 * (exponent + log2 l)
//
//     no key, or scores of -inf alone     O = 0, lse = -inf. l is 0, and the reference is the first one.
//     a reference too far from 0          O = lse = NaN (largest_exponent in softmax_scale.cuh)
#pragma once

#include <cmath>

#include "common/cuda_utils.cuh"
#include "common/softmax_scale.cuh"

#if defined(__CUDACC__)
#include "common/ptx.cuh"
#endif

namespace flash {

struct RowEnd {
    float factor;  // of O
    float lse;     // natural logarithm
};

namespace row_end_detail {
#if defined(__CUDA_ARCH__)
FLASH_DEVICE float power(float x) { return exp2_approx(x); }
FLASH_DEVICE float logarithm(float x) { return __log2f(x); }
FLASH_DEVICE float reciprocal(float x) { return reciprocal_approx(x); }
#else
inline float power(float x) { return std::exp2(x); }
inline float logarithm(float x) { return std::log2(x); }
inline float reciprocal(float x) { return 1.0f / x; }
#endif
}  // namespace row_end_detail

// l, or NaN where the reference is too far from 0 for it to be right. `unseen`: the reference is the first
// one, lowest_score, because no score of the row was above it. `largest`: see largest_exponent.
FLASH_HOST_DEVICE float sum_or_nan(float l, float exponent, bool unseen, float largest) {
    return fabsf(exponent) > largest && !unseen ? NAN : l;
}

// `l`: of sum_or_nan. It is 0 only of rows that have seen nothing.
FLASH_HOST_DEVICE RowEnd end_row(float exponent, float l) {
    using namespace row_end_detail;
    return {l == 0.0f ? 0.0f : reciprocal(l), (exponent + logarithm(l)) * kLn2};
}

// With a sink, one more logit without a value. It may exceed all scores by far, and then takes the place of
// their reference, or be infinite, or the only one.
FLASH_HOST_DEVICE RowEnd end_row(float exponent, float l, float sink) {
    using namespace row_end_detail;
    if (l == 0.0f) return {0.0f, sink};
    const float exponent_sink = sink * kLog2e;
    const float larger = fmaxf(exponent, exponent_sink);
    const float weight = power(exponent - larger);  // of the row's own keys
    const float weight_sink = exponent_sink == larger ? 1.0f : power(exponent_sink - larger);
    const float sum = l * weight + weight_sink;
    return {weight * reciprocal(sum), (larger + logarithm(sum)) * kLn2};
}

}  // namespace flash
