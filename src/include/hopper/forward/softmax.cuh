// The online softmax of one warpgroup's tile, in float32, two rows a thread (r = 0, 1).
//
// For every row: reference m (in units of the scores), sum l = sum of exp2((s - m) c) with
// c = softmax_scale log2(e), and O = sum of the same P times V. When m changes, l and O are multiplied
// by 2^((m_old - m_new) c). Sums stay with the thread until the end; maxima are shared by the four lanes of a
// row.
//
// Exact: m is the maximum up to and with this tile; the exponentials wait for it.
//
// Lagged: the exponentials take the reference known before the tile, so nothing stands between the product
// and them. How far the tile outgrew the reference (in powers of two) is found beside them by an integer
// maximum - the bits of floats above zero order like integers, and those of floats below zero are negative -
// and looked at once all wgmma have drained:
//     growth <= 2^8     nothing: P <= 256 fits fp16 and bf16, l and O have room
//     growth <= 2^100   P, l, O are rescaled to the new maximum
//     more, or NaN      P may have overflowed: the tile's scores are computed again, with the exact softmax
//
// By row (LAGGED_BY_ROW): lagged, but what becomes of a row depends on nothing but the row's own scores, so
// that its bits are the same beside any others, in any loop, from any tile on. Of each row by itself:
//     nothing seen before                 exact: the reference is the tile's maximum
//     growth <= 2^5                       the reference stays
//     growth <= 2^100                     it becomes the maximum after the exponentials
//     more                                exact: it becomes the maximum before them
// Less growth is tolerated than of a warp, where one row's growth makes all sixteen take their maxima: the
// largest P of a row with few large weights is rounded, as l is not, unless the reference is its own score.
// Rows with few keys in the first tile, as under a causal mask, often outgrow it by 2^3, which cost prompts
// of 4096 keys 2 to 3 %. `row_step` does this with the maximum known ahead, for tiles with a mask and for
// those that are computed again; `lagged_step` and `adopt_growth_of_rows` do the same, bit for bit, with the
// exponentials first, and so does the first `exact_step` of a row.
//
// A score of -inf, hidden by a mask or as computed, has the weight 0. A row of which all are -inf so far has
// the reference `lowest`, which is finite (softmax_scale.cuh): (-inf) - (-inf) does not come up, and the
// first finite score outgrows it.
#pragma once

#include <cmath>

#include "common/quad.cuh"
#include "hopper/layout.cuh"
#include "hopper/ptx_sm90.cuh"

namespace flash::hopper {

inline constexpr float kToleratedGrowth = 8.0f;  // log2; P <= 2^8
inline constexpr float kToleratedGrowthByRow = 5.0f;
inline constexpr float kRescalableGrowth = 100.0f;  // log2; P <= 2^100 and its sum stay finite

// From where a thread's scores of a tile are counted. References are counted from 0.
struct FromZero {
    FLASH_DEVICE float absolute(int, float score) const { return score; }
    FLASH_DEVICE float relative(int, float score) const { return score; }
    FLASH_DEVICE float with_step(int, float score) const { return score; }
    FLASH_DEVICE float exponent_with_step(int, float x) const { return x; }
};

// From a number of each row in the thread's first column, and from key to key by a step more. Rounded up, as
// exponent_of is.
struct FromRowStart {
    float start[2];
    float step, exponent_step;

    FLASH_DEVICE float absolute(int r, float score) const { return __fadd_ru(score, start[r]); }
    FLASH_DEVICE float relative(int r, float score) const { return __fadd_ru(score, -start[r]); }
    FLASH_DEVICE float with_step(int i, float score) const { return fmaf(step, column(i), score); }
    FLASH_DEVICE float exponent_with_step(int i, float x) const { return fmaf(exponent_step, column(i), x); }

    static FLASH_DEVICE float column(int i) { return float(8 * (i / 4) + i % 2); }
};

// kAnyScores: scores may be of any size, as functions of the user's make them.
template <int B_c, bool kAnyScores = false>
struct OnlineSoftmax {
    float reference[2];
    float sum[2];            // the thread's share
    float rescale[2];        // of O, by the last step
    int growth[2] = {0, 0};  // lagged: bits of the largest log2 growth of the last step

    // S -> P in place, with the exact maximum. kFirst: there is no tile before.
    template <bool kFirst, typename From = FromZero>
    FLASH_DEVICE void exact_step(float (&rmem_S)[B_c / 2], float exponent_factor, float lowest,
                                 const From &from = {}) {
#pragma unroll
        for (int i = 0; i < B_c / 2; ++i) rmem_S[i] = from.with_step(i, rmem_S[i]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float maximum = fmaxf(kFirst ? lowest : reference[r], row_maximum(rmem_S, r, from));
            rescale[r] = kFirst ? 1.f : exp2_approx((reference[r] - maximum) * exponent_factor);
            reference[r] = maximum;
            const float offset = exponent_of(from.relative(r, maximum), exponent_factor);
            float even = 0.f, odd = 0.f;  // two chains of additions
#pragma unroll
            for (int i = 2 * r; i < B_c / 2; i += 4) {
                const float p0 = exp2_approx(fmaf(rmem_S[i], exponent_factor, -offset));
                const float p1 = exp2_approx(fmaf(rmem_S[i + 1], exponent_factor, -offset));
                rmem_S[i] = p0;
                rmem_S[i + 1] = p1;
                even += p0;
                odd += p1;
            }
            sum[r] = (kFirst ? 0.f : sum[r] * rescale[r]) + (even + odd);
        }
    }

    // S -> P in place, with the reference of the tile before; sets `growth`.
    template <typename From = FromZero>
    FLASH_DEVICE void lagged_step(float (&rmem_S)[B_c / 2], float exponent_factor, const From &from = {}) {
        const float offset0 = exponent_of(from.relative(0, reference[0]), exponent_factor);
        const float offset1 = exponent_of(from.relative(1, reference[1]), exponent_factor);
        float even0 = 0.f, odd0 = 0.f, even1 = 0.f, odd1 = 0.f;
        growth[0] = growth[1] = 0;
#pragma unroll
        for (int i = 0; i < B_c / 2; i += 4) {
            const float x0 = from.exponent_with_step(i, fmaf(rmem_S[i], exponent_factor, -offset0));
            const float x1 = from.exponent_with_step(i + 1, fmaf(rmem_S[i + 1], exponent_factor, -offset0));
            const float y0 = from.exponent_with_step(i + 2, fmaf(rmem_S[i + 2], exponent_factor, -offset1));
            const float y1 = from.exponent_with_step(i + 3, fmaf(rmem_S[i + 3], exponent_factor, -offset1));
            growth[0] = __vimax3_s32(growth[0], __float_as_int(x0), __float_as_int(x1));
            growth[1] = __vimax3_s32(growth[1], __float_as_int(y0), __float_as_int(y1));
            rmem_S[i] = exp2_approx(x0);
            rmem_S[i + 1] = exp2_approx(x1);
            rmem_S[i + 2] = exp2_approx(y0);
            rmem_S[i + 3] = exp2_approx(y1);
            even0 += rmem_S[i];
            odd0 += rmem_S[i + 1];
            even1 += rmem_S[i + 2];
            odd1 += rmem_S[i + 3];
        }
        sum[0] += even0 + odd0;
        sum[1] += even1 + odd1;
    }

    // Whether any row of the warp outgrew its reference by more than 2^limit. NaN counts as more.
    FLASH_DEVICE bool warp_outgrew(float limit) const {
        return __any_sync(kAllLanes, max(growth[0], growth[1]) > __float_as_int(limit));
    }

    // Takes the growth of the last lagged step into the reference: P and the sums follow; `rescale` is O's.
    FLASH_DEVICE void adopt_growth(float (&rmem_P)[B_c / 2], float exponent_factor,
                                   float inv_exponent_factor) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float grown = reference[r] + quad_maximum(__int_as_float(growth[r])) * inv_exponent_factor;
            rescale[r] = exp2_approx((reference[r] - grown) * exponent_factor);  // of the rounded reference
            reference[r] = grown;
            sum[r] *= rescale[r];
        }
#pragma unroll
        for (int i = 0; i < B_c / 2; ++i) rmem_P[i] *= rescale[(i >> 1) & 1];
    }

    // The same, of each row that has outgrown its reference by more than is tolerated; the others stay.
    FLASH_DEVICE void adopt_growth_of_rows(float (&rmem_P)[B_c / 2], float exponent_factor,
                                           float inv_exponent_factor) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float grown_by = quad_maximum(__int_as_float(growth[r]));
            const float grown = grown_by > kToleratedGrowthByRow
                                    ? fmaf(grown_by, inv_exponent_factor, reference[r])
                                    : reference[r];
            rescale[r] = exp2_approx((reference[r] - grown) * exponent_factor);  // 1 where it stays
            reference[r] = grown;
            sum[r] = __fmul_rn(sum[r], rescale[r]);
        }
#pragma unroll
        for (int i = 0; i < B_c / 2; ++i) rmem_P[i] *= rescale[(i >> 1) & 1];
    }

    // S -> P in place, each row by itself, with its maximum known ahead.
    FLASH_DEVICE void row_step(float (&rmem_S)[B_c / 2], float exponent_factor, float inv_exponent_factor,
                               float lowest) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float before = reference[r];
            const float maximum = fmaxf(lowest, row_maximum(rmem_S, r));
            // The exponent of the largest score, as a lagged step sees it.
            const float grown_by = fmaf(maximum, exponent_factor, -__fmul_rn(before, exponent_factor));
            const bool exact = before == lowest || !(grown_by <= kRescalableGrowth);
            const float base = exact ? maximum : before;
            const float weight = exact ? exp2_approx((before - maximum) * exponent_factor) : 1.f;
            const float grown = !exact && grown_by > kToleratedGrowthByRow
                                    ? fmaf(grown_by, inv_exponent_factor, before)
                                    : base;
            const float later_weight = exp2_approx((base - grown) * exponent_factor);  // 1 where it stays
            const float offset = __fmul_rn(base, exponent_factor);
            float even = 0.f, odd = 0.f;
#pragma unroll
            for (int i = 2 * r; i < B_c / 2; i += 4) {
                const float p0 = exp2_approx(fmaf(rmem_S[i], exponent_factor, -offset));
                const float p1 = exp2_approx(fmaf(rmem_S[i + 1], exponent_factor, -offset));
                rmem_S[i] = p0 * later_weight;
                rmem_S[i + 1] = p1 * later_weight;
                even += p0;
                odd += p1;
            }
            sum[r] = __fmul_rn(fmaf(sum[r], weight, even + odd), later_weight);
            rescale[r] = weight * later_weight;
            reference[r] = grown;
        }
    }

    // Takes the last lagged step back out of the sums. One that overflowed has outgrown all before it by so
    // much that nothing of it is left, but NaN.
    FLASH_DEVICE void undo_lagged_step(const float (&rmem_P)[B_c / 2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float tile = 0.f;
#pragma unroll
            for (int i = 2 * r; i < B_c / 2; i += 4) tile += rmem_P[i] + rmem_P[i + 1];
            const float before = sum[r] - tile;
            sum[r] = sum[r] == INFINITY || before < 0.f ? 0.f : before;  // a rounding below 0 is 0
        }
    }

  private:
    // Rounded up, no P of the step that found the reference is above 1: a tile of which all scores are -1e30
    // would have P of infinity else, which no later tile takes out of O.
    static FLASH_DEVICE float exponent_of(float score, float exponent_factor) {
        return kAnyScores ? __fmul_ru(score, exponent_factor) : score * exponent_factor;
    }
    template <typename From = FromZero>
    FLASH_DEVICE float row_maximum(const float (&rmem_S)[B_c / 2], int r, const From &from = {}) const {
        float even = rmem_S[2 * r], odd = rmem_S[2 * r + 1];  // two chains
#pragma unroll
        for (int i = 4 + 2 * r; i < B_c / 2; i += 4) {
            even = fmaxf(even, rmem_S[i]);
            odd = fmaxf(odd, rmem_S[i + 1]);
        }
        return quad_maximum(from.absolute(r, fmaxf(even, odd)));
    }
};

// Multiplies an accumulator (64, n) by one factor a row.
template <int n>
FLASH_DEVICE void scale_rows(float (&rmem)[n], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < n; ++i) rmem[i] *= factor[(i >> 1) & 1];
}

}  // namespace flash::hopper
