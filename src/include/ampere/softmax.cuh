// The online softmax of one warp's rows, in fp32.
//
// For every row it keeps the maximum m of the scores seen and the sum l of P = exp(S - m) over the keys
// seen. When a block of keys raises m to m', what was summed before is rescaled by exp(m - m'):
//
//     l := l * exp(m - m') + sum(P),     O := O * exp(m - m') + P V,     in the end O / l
//
// A thread holds the parts of two rows in each 16-row tile (fragments.cuh): rows lane / 4 and + 8. The
// four threads of a quad share a row: the maximum is made common at every step, the sum in the end.
#pragma once

#include "ampere/gemm.cuh"
#include "ampere/static_kernel_configuration.cuh"
#include "ptx.cuh"
#include "softmax_scale.cuh"

namespace flash::ampere {

inline constexpr int kRowsPerThread = 2;  // in a 16-row tile

template <typename Kernel>
struct OnlineSoftmax {
    static constexpr bool optimized = Kernel::cfg.optimized_softmax;

    SoftmaxScale scale;
    float row_max[Kernel::m_tiles][kRowsPerThread];  // m, of scaled scores unless optimized
    float row_sum[Kernel::m_tiles][kRowsPerThread];  // l, this thread's columns only

    FLASH_DEVICE explicit OnlineSoftmax(const SoftmaxScale &softmax_scale) : scale(softmax_scale) {
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < kRowsPerThread; ++r) {
                row_max[m][r] = scale.lowest;
                row_sum[m][r] = 0.0f;
            }
        }
    }

    // Before scores are masked. The optimized softmax scales within the exponent instead.
    FLASH_DEVICE void scale_scores(Scores<Kernel> &S) const {
        if constexpr (!optimized) {
#pragma unroll
            for (auto &row : S.rmem) {
#pragma unroll
                for (auto &tile : row) {
#pragma unroll
                    for (float &s : tile) s *= scale.score_factor;
                }
            }
        }
    }

    // Takes the scores into the maximum and rescales what was summed before. The optimized softmax
    // does not rescale at the first step, when nothing was.
    FLASH_DEVICE void update_max(const Scores<Kernel> &S, Output<Kernel> &O, bool first_step) {
        float old_max[Kernel::m_tiles][kRowsPerThread];
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < kRowsPerThread; ++r) {
                old_max[m][r] = row_max[m][r];
                row_max[m][r] = quad_max(max_of_row(S, m, r, old_max[m][r]));
            }
        }
        if (optimized && first_step) return;
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < kRowsPerThread; ++r) {
                rescale(O, m, r, exp2_approx((old_max[m][r] - row_max[m][r]) * scale.exponent_factor));
            }
        }
    }

    // P = exp(S - m) of 16 keys, added to l in fp32 and then rounded to the input type. The accumulators
    // of two neighbouring 8-column tiles of S are one A fragment of P (fragments.cuh).
    FLASH_DEVICE AFragment<Kernel> probabilities(const Scores<Kernel> &S, int key_tile) {
        AFragment<Kernel> P;  // (warp_rows, 16)
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = i % 2;
                const float (&tile)[4] = S.rmem[m][2 * key_tile + i / 2];
                const float left = exponential(tile[2 * r], m, r);
                const float right = exponential(tile[2 * r + 1], m, r);
                row_sum[m][r] += left + right;
                P.rmem[m][i] = pack<Kernel::dtype>(left, right);
            }
        }
        return P;
    }

    // The sum of a row over the whole quad.
    FLASH_DEVICE float total(int m, int r) const {
        float sum = row_sum[m][r];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        return sum + __shfl_xor_sync(0xffffffff, sum, 2);
    }

    // log(sum over keys of exp(scaled score)), natural logarithm.
    FLASH_DEVICE float log_sum_exp(int m, int r, float total) const {
        return (row_max[m][r] * scale.exponent_factor + __log2f(total)) * kLn2;
    }

  private:
    static FLASH_DEVICE float max_of_row(const Scores<Kernel> &S, int m, int r, float start) {
        float even = start, odd = start;  // two chains, half as long
#pragma unroll
        for (const auto &tile : S.rmem[m]) {
            even = fmaxf(even, tile[2 * r]);
            odd = fmaxf(odd, tile[2 * r + 1]);
        }
        return fmaxf(even, odd);
    }

    static FLASH_DEVICE float quad_max(float x) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
        return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
    }

    FLASH_DEVICE void rescale(Output<Kernel> &O, int m, int r, float factor) {
        row_sum[m][r] *= factor;
#pragma unroll
        for (auto &tile : O.rmem[m]) {
            tile[2 * r] *= factor;
            tile[2 * r + 1] *= factor;
        }
    }

    FLASH_DEVICE float exponential(float s, int m, int r) const {
        if constexpr (optimized) {
            return exp2_approx(fmaf(s, scale.exponent_factor, -row_max[m][r] * scale.exponent_factor));
        } else {
            return exp2_approx((s - row_max[m][r]) * scale.exponent_factor);
        }
    }
};

}  // namespace flash::ampere
