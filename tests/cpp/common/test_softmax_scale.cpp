// softmax_scale.cuh: the optimized softmax's exponents are those of the plain one for every scale.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

#include "check.h"
#include "common/softmax_scale.cuh"

using namespace flash;

static float probability(const SoftmaxScale &scale, bool optimized, float score, float row_max) {
    if (!optimized) return std::exp2((score - row_max) * scale.exponent_factor);
    // As the kernel: the product with the maximum is rounded, the other one is not. (Through double, so
    // that no host compiler contracts it otherwise.)
    const float scaled_max = row_max * scale.exponent_factor;
    return std::exp2(static_cast<float>(double(score) * scale.exponent_factor - scaled_max));
}

int main() {
    const float infinity = std::numeric_limits<float>::infinity();
    for (const float factor :
         {0.125f, 1.0f, -0.125f, -3.0f, 0.0f, 1e-30f, 1e30f, FLT_MAX, -FLT_MAX, 1e-45f}) {
        for (const bool optimized : {false, true}) {
            const SoftmaxScale scale = make_softmax_scale(factor, optimized);
            CHECK(scale.exponent_factor > 0 && std::isfinite(scale.exponent_factor));
            CHECK(std::isfinite(scale.lowest) && std::isfinite(scale.lowest * scale.exponent_factor));
            CHECK(scale.negate_Q == (optimized && factor < 0));
            CHECK(scale.score_factor == (optimized ? 1.0f : factor));
            // A masked score counts nothing, before and after the row has seen a key.
            CHECK(probability(scale, optimized, -infinity, scale.lowest) == 0);
            CHECK(probability(scale, optimized, -infinity, 5.0f) == 0);
            // The largest score counts 1, as exactly as the scaled score is known.
            const float error = optimized ? std::ldexp(5.0f * scale.exponent_factor, -23) : 0.0f;
            CHECK(error > 1 || std::fabs(probability(scale, optimized, 5.0f, 5.0f) - 1) <= error);
        }
    }
    for (const float factor : {0.125f, 1.0f, -0.125f, -2.0f, 0.0f}) {
        const SoftmaxScale scale = make_softmax_scale(factor, true);
        const float sign = scale.negate_Q ? -1.0f : 1.0f;
        for (const float score : {-8.0f, 0.5f, 3.0f}) {
            for (const float other : {-8.0f, 0.5f, 3.0f}) {
                const float exact = std::exp((score - other) * factor);
                const float p = probability(scale, true, sign * score, sign * other);
                CHECK(std::fabs(p - exact) <= 1e-5f * exact);
            }
        }
    }
    // A kernel that divides by the factor names a least one. Larger factors do not change.
    for (const float least : {FLT_MIN, 0x1p-100f}) {
        CHECK(make_softmax_scale(0.0f, true, least).exponent_factor == least);
        CHECK(make_softmax_scale(0.125f, true, least).exponent_factor == 0.125f * kLog2e);
        CHECK(make_capped_softmax_scale(1.0f, 1e-35f, least).exponent_factor ==
              std::max(1e-35f * kLog2e, least));
        CHECK(make_capped_softmax_scale(1.0f, 30.0f, least).exponent_factor == 30.0f * kLog2e);
    }
    // No finite score is below the lowest one, unless it overflows as an exponent.
    for (const float factor : {1e-30f, 0.18f, 1.0f, 1.5f, 30.0f, 1e30f}) {
        const float lowest = lowest_score(factor);
        CHECK(factor > 1 ? double(-FLT_MAX) / factor * 0.999 > lowest : lowest == -FLT_MAX);
    }
    // Up to largest_exponent the largest P of a row has room in its type, next to a lagged reference's 2^8,
    // and so has what is 2^-14 of it.
    for (const DType dtype : {DType::FP16, DType::BF16}) {
        const float largest = largest_exponent(dtype, true);
        const int room = dtype == DType::FP16 ? 15 : 126;
        for (float exponent = 1; exponent < largest; exponent *= 1.37f) {
            const float off =
                (std::nextafter(exponent, 2 * largest) - exponent) / 2;  // by rounding m * factor
            CHECK(off + 8 <= room);
            CHECK(dtype == DType::BF16 || -off - 8 >= -24);
        }
        CHECK(largest > 0x1p26f * kLog2e);  // scores that the contract promises
        CHECK(largest_exponent(dtype, false) == FLT_MAX);
    }
    // Soft cap: softcap * tanh(score * scale / softcap) in the exponent, for any sign of the scale.
    for (const float factor : {0.125f, -3.0f, 0.0f, 1e30f, -FLT_MAX}) {
        for (const float softcap : {0.0f, 1e-45f, FLT_MIN, 1e-3f, 30.0f, 1e6f, FLT_MAX}) {
            const SoftmaxScale scale = make_capped_softmax_scale(factor, softcap);
            CHECK(std::isfinite(scale.score_factor) && std::isfinite(scale.exponent_factor));
            CHECK(scale.exponent_factor > 0 && std::isfinite(scale.lowest * scale.exponent_factor));
            CHECK(scale.lowest < -1 && !scale.negate_Q);
            CHECK(-infinity * scale.exponent_factor == -infinity);
            if (std::fabs(factor) > 1e6f || softcap > 1e6f || softcap < 1e-3f) continue;
            for (const float score : {-8.0f, 0.5f, 3.0f}) {
                const double exact = softcap * std::tanh(double(score) * factor / softcap);
                const double given =
                    std::tanh(double(score) * scale.score_factor) * scale.exponent_factor * kLn2;
                CHECK(std::fabs(given - exact) <= 1e-6 * std::fabs(exact));
            }
        }
    }
    return report();
}
