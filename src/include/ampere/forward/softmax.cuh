// The online softmax of one warp's rows, in fp32.
//
// For every row it keeps a reference m and the sum l of P = exp(S - m) over the keys seen. When m
// becomes m', what was summed before is rescaled by exp(m - m'):
//
//     l := l * exp(m - m') + sum(P),     O := O * exp(m - m') + P V,     in the end O / l
//
// Any m is right as long as P, l and O stay within their types: it cancels. What m is decides how much
// stands between the two products of a block (softmax_reference):
//
//     EXACT                the maximum of the scores seen. Nothing exceeds 1; every block rescales.
//     EXACT_SKIP_RESCALE   the same; a warp in which no row grew does not rescale.
//     LAGGED               an earlier maximum, as long as P stays below 2^8: whether it does is found without
//                          shuffles and at half the cost of a maximum. If not, the maximum of the scores
//                          seen.
//     ANCHORED             the maximum of the blocks that `update<true>` saw, for good: no maximum at all.
//                          bf16 has the exponents of fp32, so P is as accurate at 2^60 as at 1. Sums that
//                          have left the safe range are seen in the end, and the block is computed anew.
//
// A thread holds the parts of two rows in each 16-row tile (fragments.cuh): rows lane / 4 and + 8. The
// four threads of a quad share a row: the maximum is made common at every step, the sum in the end, or
// by the tensor cores, which multiply P by a column of ones (tensor_row_sums).
#pragma once

#include "ampere/forward/static_kernel_configuration.cuh"
#include "ampere/gemm.cuh"
#include "common/ptx.cuh"
#include "common/quad.cuh"
#include "common/row_end.cuh"
#include "common/softcap.cuh"
#include "common/softmax_scale.cuh"

namespace flash::ampere {

inline constexpr int kRowsPerThread = 2;        // in a 16-row tile
inline constexpr float kLaggedGrowth = 8.0f;    // exponents that LAGGED lets pass
inline constexpr float kAnchoredLimit = 1e18f;  // sums beyond 2^60: then |V| < 2^68 cannot overflow O

template <typename Kernel>
struct OnlineSoftmax {
    static constexpr bool optimized = Kernel::cfg.optimized_softmax;
    static constexpr bool tensor_sums = Kernel::cfg.tensor_row_sums;
    static constexpr SoftmaxReference mode = Kernel::cfg.softmax_reference;

    SoftmaxScale scale;
    // The reference. Optimized: -m * exponent_factor, ready to be added; else m, of scaled scores.
    float reference[Kernel::m_tiles][kRowsPerThread];
    // l. On the tensor cores: an accumulator whose columns are all alike; else this thread's columns only.
    float row_sum[Kernel::m_tiles][tensor_sums ? 4 : kRowsPerThread];

    FLASH_DEVICE explicit OnlineSoftmax(const SoftmaxScale &softmax_scale) : scale(softmax_scale) {
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (float &x : reference[m]) x = reference_of(scale.lowest);
#pragma unroll
            for (float &sum : row_sum[m]) sum = 0.0f;
        }
    }

    // Before scores are masked. The optimized softmax scales within the exponent where nothing else takes
    // scores.
    FLASH_DEVICE void scale_scores(Scores<Kernel> &S) const {
        if constexpr (!optimized || Kernel::traits.softcap || Kernel::mod_changes_scores) {
#pragma unroll
            for (auto &row : S.rmem) {
#pragma unroll
                for (auto &tile : row) {
#pragma unroll
                    for (float &s : tile) {
                        s *= scale.score_factor;
                        if constexpr (Kernel::traits.softcap) s = softcap_tanh(s);
                    }
                }
            }
        }
    }

    // Takes a block's scores into the reference and rescales what was summed before. kExact: by their
    // maximum, whatever the mode; blocks with a mask and the first one go this way. `first`: nothing
    // was summed before. The optimized softmax does not rescale then. `share`: called with the maxima of a
    // pair's warp, takes those of the other's keys into them.
    template <bool kExact, typename Share>
    FLASH_DEVICE void update(Scores<Kernel> &S, Output<Kernel> &O, bool first, Share share) {
        if constexpr (kExact || !Kernel::approximate_reference) {
            take_maximum(S, O, first, share);
        } else if constexpr (mode == SoftmaxReference::LAGGED) {
            take_growth(S, O, share);
        }
    }

    // P = exp(S - m) of 16 keys, rounded to the input type, and added to l: in fp32 before it is rounded, or
    // by the tensor cores afterwards. What dropout does not keep is 0 then. The accumulators of two
    // neighbouring 8-column tiles of S are one A fragment of P (fragments.cuh).
    template <typename Kept>
    FLASH_DEVICE AFragment<Kernel> probabilities(const Scores<Kernel> &S, int key_tile, const Kept &kept) {
        AFragment<Kernel> P;  // (warp_rows, 16)
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = i % 2;
                const float (&tile)[4] = S.rmem[m][2 * key_tile + i / 2];
                float left = exponential(tile[2 * r], m, r);
                float right = exponential(tile[2 * r + 1], m, r);
                if constexpr (!tensor_sums) row_sum[m][r] += left + right;
                if constexpr (Kernel::drops) {
                    const int square = m * (Kernel::warp_keys / kMmaN) + 2 * key_tile + i / 2;
                    if (!kept.has(square, 2 * r)) left = 0.0f;
                    if (!kept.has(square, 2 * r + 1)) right = 0.0f;
                }
                P.rmem[m][i] = pack<Kernel::dtype>(left, right);
            }
        }
        if constexpr (tensor_sums) add_rows(P);
        return P;
    }

    // Adds the rows of P to l on the tensor cores.
    FLASH_DEVICE void add_rows(const AFragment<Kernel> &P) {
        constexpr uint32_t ones = Kernel::dtype == DType::FP16 ? 0x3c003c00 : 0x3f803f80;
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) mma<Kernel::dtype>(row_sum[m], P.rmem[m], ones, ones);
    }

    // The sum of a row over the whole quad.
    FLASH_DEVICE float total(int m, int r) const {
        if constexpr (tensor_sums) {
            return row_sum[m][2 * r];
        } else {
            return quad_sum(row_sum[m][r]);
        }
    }

    struct RowSum {
        float exponent, sum;  // of row_end.cuh
    };

    // The end of a row of which the quad has the sum `total`; `sink`: its head's sink, if there is one.
    template <typename... Sink>
    FLASH_DEVICE RowEnd end_row(int m, int r, float total, Sink... sink) const {
        const auto [exponent, sum] = exponent_and_sum(m, r, total);
        return flash::end_row(exponent, sum, sink...);
    }

    // Of the row's reference.
    FLASH_DEVICE float row_exponent(int m, int r) const {
        return optimized ? -reference[m][r] : reference[m][r] * scale.exponent_factor;
    }

    FLASH_DEVICE RowSum exponent_and_sum(int m, int r, float total) const {
        constexpr float largest = largest_exponent(Kernel::dtype, optimized);
        const float exponent = row_exponent(m, r);
        // Found out again: no register holds it through the loops. Kernels of packed sequences, whose end has
        // more to find out, spill by that what others spill without it.
        float lowest = scale.lowest;
        if constexpr (!Kernel::traits.varlen) {
            lowest = __uint_as_float(computed_here(__float_as_uint(lowest)));
        }
        const bool unseen = reference[m][r] == reference_of(lowest);
        return {exponent, sum_or_nan(total, exponent, unseen, largest)};
    }

    // Whether a score has outgrown an anchored reference, or is NaN.
    FLASH_DEVICE bool left_safe_range() const {
        float sum = 0.0f;
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < kRowsPerThread; ++r) sum += row_sum[m][tensor_sums ? 2 * r : r];
        }
        return !(sum < kAnchoredLimit);
    }

  private:
    FLASH_DEVICE float reference_of(float maximum) const {
        if constexpr (optimized && Kernel::mod_changes_scores) {
            // Scores may be of any size, and no P may be above 1: rounded down, since it is added.
            return __fmul_rd(-maximum, scale.exponent_factor);
        }
        return optimized ? -maximum * scale.exponent_factor : maximum;
    }

    template <typename Share>
    FLASH_DEVICE void take_maximum(const Scores<Kernel> &S, Output<Kernel> &O, bool first, Share share) {
        constexpr bool always_rescale = mode == SoftmaxReference::EXACT;
        float maximum[Kernel::m_tiles][kRowsPerThread];
        if constexpr (Kernel::paired_warps) {
#pragma unroll
            for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
                for (int r = 0; r < kRowsPerThread; ++r) maximum[m][r] = quad_maximum(max_of_row(S, m, r));
            }
            share(maximum);
        }
        float factor[Kernel::m_tiles][kRowsPerThread];
        bool grew = false;
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < kRowsPerThread; ++r) {
                const float old = reference[m][r];
                if constexpr (!Kernel::paired_warps) maximum[m][r] = quad_maximum(max_of_row(S, m, r));
                const float block_reference = reference_of(maximum[m][r]);
                reference[m][r] = optimized ? fminf(old, block_reference) : fmaxf(old, block_reference);
                const float step =
                    optimized ? reference[m][r] - old : (old - reference[m][r]) * scale.exponent_factor;
                factor[m][r] = exp2_approx(step);
                grew |= step < 0;
            }
        }
        if (always_rescale ? optimized && first : !__any_sync(kAllLanes, grew)) return;
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < kRowsPerThread; ++r) rescale(O, m, r, factor[m][r]);
        }
    }

    // LAGGED. Positive floats are ordered as their bits are as integers, and negative ones are negative
    // integers: whether any exponent exceeds 8 needs no comparison of floats. The exponents are computed
    // again for P: kept, they would have to be corrected when the reference moves, which takes more
    // registers.
    template <typename Share>
    FLASH_DEVICE void take_growth(const Scores<Kernel> &S, Output<Kernel> &O, Share share) {
        int largest[2] = {};
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (const auto &tile : S.rmem[m]) {
#pragma unroll
                for (int r = 0; r < kRowsPerThread; ++r) {
                    const float left = exponent(tile[2 * r], m, r), right = exponent(tile[2 * r + 1], m, r);
                    largest[r] = __vimax3_s32(largest[r], __float_as_int(left), __float_as_int(right));
                }
            }
        }
        const bool grew = max(largest[0], largest[1]) > __float_as_int(kLaggedGrowth);
        if (__any_sync(kAllLanes, grew)) take_maximum(S, O, false, share);
    }

    static FLASH_DEVICE float max_of_row(const Scores<Kernel> &S, int m, int r) {
        float even = S.rmem[m][0][2 * r], odd = S.rmem[m][0][2 * r + 1];  // two chains, half as long
#pragma unroll
        for (const auto &tile : S.rmem[m]) {
            even = fmaxf(even, tile[2 * r]);
            odd = fmaxf(odd, tile[2 * r + 1]);
        }
        return fmaxf(even, odd);
    }

    FLASH_DEVICE void rescale(Output<Kernel> &O, int m, int r, float factor) {
        row_sum[m][tensor_sums ? 2 * r : r] *= factor;
#pragma unroll
        for (auto &tile : O.rmem[m]) {
            tile[2 * r] *= factor;
            tile[2 * r + 1] *= factor;
        }
    }

    FLASH_DEVICE float exponent(float s, int m, int r) const {
        return optimized ? fmaf(s, scale.exponent_factor, reference[m][r])
                         : (s - reference[m][r]) * scale.exponent_factor;
    }

    FLASH_DEVICE float exponential(float s, int m, int r) const { return exp2_approx(exponent(s, m, r)); }
};

}  // namespace flash::ampere
