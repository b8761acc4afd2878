// Sums of the gradients of captured tensors, with equal bits in whatever order they are made.
//
// The gradient of an element is the sum of dS d score / d element over all scores that have loaded it, which
// thread blocks find in no order. So the sums are whole numbers: of each tensor the largest term is looked
// for first, from which a power of two follows; times that each term is rounded to 64 bits, which as many
// terms as there are cannot overflow. A term that is not finite leaves a sum that no finite ones make.
//
// `scales`, of a launch, holds two numbers for each of n tensors: at i the bits of the largest term, which
// begins as 0, and at n + i the power. A gradient is its sum times 2^-power.
#pragma once

#include "common/mod_values.cuh"
#include "common/ptx.cuh"

namespace flash {

// Finite sums stay below 2^kSumBits; what is not finite leaves 2^(kSumBits + 1) or more.
inline constexpr int kSumBits = 60;
inline constexpr int64_t kNotFinite = int64_t(1) << 62;

// So many bits hold the number of terms of one sum. `terms`: of all scores, by what they differ in.
inline int bits_of_terms(const mods::Gathered &gathered, int64_t n_b, int64_t n_h, int64_t n_q, int64_t n_k) {
    double terms = gathered.loads;
    if (!gathered.by_b) terms *= double(n_b);
    if (!gathered.by_h) terms *= double(n_h);
    if (!gathered.by_q) terms *= double(n_q);
    if (!gathered.by_k) terms *= double(n_k);
    int bits = 0;
    while (bits < kSumBits && double(int64_t(1) << bits) < terms) ++bits;
    return bits;
}

// The power by which terms whose largest has these bits become whole numbers.
FLASH_DEVICE int power_of(int largest_bits, int bits_of_terms) {
    const int exponent = largest_bits >> 23;  // of a float; the largest is below 2^(exponent - 126)
    return kSumBits - bits_of_terms - (exponent - 126);
}

// value * 2^power, in steps that no float overflows.
FLASH_DEVICE float times_power(float value, int power) {
    const auto factor = [](int p) { return __int_as_float((p + 127) << 23); };
    const int half = power / 2;
    return value * factor(half) * factor(power - half);
}

FLASH_DEVICE bool is_finite(float x) { return fabsf(x) <= 0x1.fffffep127f; }

// The largest term of each tensor.
template <int kTensors>
struct LargestTerms {
    int bits[kTensors] = {};

    template <typename Load, typename Tensor>
    FLASH_DEVICE void add(Load, Tensor, int64_t *, int64_t, float value) {
        if (is_finite(value)) bits[Tensor::number] = max(bits[Tensor::number], __float_as_int(fabsf(value)));
    }

    FLASH_DEVICE void finish(int *scales) {
#pragma unroll
        for (int i = 0; i < kTensors; ++i) {
            const int largest = __reduce_max_sync(kAllLanes, bits[i]);
            if (threadIdx.x % kWarpSize == 0 && largest > 0) atomicMax(scales + i, largest);
        }
    }
};

// The sums themselves. Terms of one element that follow each other are added up in registers.
template <int kTensors, int kLoads>
struct TermSums {
    int powers[kTensors];
    int64_t pending[kLoads] = {};
    int64_t *place[kLoads] = {};

    template <typename Load, typename Tensor>
    FLASH_DEVICE void add(Load, Tensor, int64_t *sums, int64_t offset, float value) {
        int64_t *const element = sums + offset;
        if (element != place[Load::number]) {
            flush(Load::number);
            place[Load::number] = element;
        }
        if (is_finite(value)) {
            pending[Load::number] += __float2ll_rn(times_power(value, powers[Tensor::number]));
        } else {
            atomicMax(reinterpret_cast<long long *>(element), kNotFinite);
        }
    }

    FLASH_DEVICE void finish(int *) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) flush(i);
    }

  private:
    FLASH_DEVICE void flush(int load) {
        if (pending[load] != 0) {
            atomicAdd(reinterpret_cast<unsigned long long *>(place[load]),
                      static_cast<unsigned long long>(pending[load]));
        }
        pending[load] = 0;
    }
};

}  // namespace flash
