// What generated mods compute with: captured tensors, and operations where C++ leaves something open.
//
// Whole numbers have 64 bits and wrap around; generated code uses 32 where its bounds show that they hold the
// same. Rules, the same for the CPU (flash_helpers/mods/operations.py):
//
//     a // b, a % b    round to minus infinity; division by 0 gives 0, with remainder 0
//     a << b, a >> b   a count below 0 or above 63 gives 0, of >> the sign
//     to_int           towards zero; beyond +-2^62 it gives that, of NaN 0
//     tensor[i]        an index below 0 counts from the end; one outside of the tensor gives 0, and nothing
//     is read
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/cuda_utils.cuh"
#include "common/dropout.cuh"
#include "common/mod_ranges.cuh"
#include "common/philox.cuh"
#include "common/softcap.cuh"
#include "common/streamed_tensor.cuh"
#include "mod_arguments.cuh"

namespace flash::mods {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr int64_t kLargestInt = int64_t(1) << 62;

// ---------------------------------------------------------------------- elements of tensors
struct Bool {
    uint8_t bits;
};
struct Fp16 {
    uint16_t bits;
};
struct Bf16 {
    uint16_t bits;
};

FLASH_HOST_DEVICE float float_of_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

FLASH_HOST_DEVICE bool value_of(Bool x) { return x.bits != 0; }
FLASH_HOST_DEVICE float value_of(Bf16 x) { return float_of_bits(uint32_t(x.bits) << 16); }
FLASH_HOST_DEVICE float value_of(float x) { return x; }
FLASH_HOST_DEVICE int64_t value_of(int64_t x) { return x; }
FLASH_HOST_DEVICE int value_of(int x) { return x; }
FLASH_HOST_DEVICE float value_of(Fp16 x) {
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
    return value;
#else
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31;
    const uint32_t mantissa = x.bits & 1023;
    if (exponent == 31) return float_of_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent != 0) return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    const float small = float(mantissa) * 0x1p-24f;
    return sign ? -small : small;
#endif
}

// An index of which the bounds show that it is not below 0.
template <typename Index>
struct NotNegative {
    Index value;
};
template <typename Index>
FLASH_HOST_DEVICE NotNegative<Index> not_negative(Index value) {
    return {value};
}

// A row of a tensor: its last dimension, at places of the others.
template <typename ELEMENT>
struct RowOf {
    using Element = ELEMENT;
    const Element *data;
    int size;  // 0: the places are outside of the tensor
};

template <typename Element, int kDims>
struct Tensor {
    const Element *data;
    int64_t stride[kDims > 0 ? kDims : 1];
    int size[kDims > 0 ? kDims : 1];

    template <typename... Index>
    FLASH_HOST_DEVICE auto at(Index... index) const {
        static_assert(sizeof...(Index) == kDims);
        int64_t offset = 0;
        bool inside = true;
        [[maybe_unused]] int axis = 0;
        (add(offset, inside, axis++, index), ...);
        using Value = decltype(value_of(Element{}));
        return inside ? value_of(data[offset]) : Value{};
    }

    // The row at places of all dimensions but the last.
    template <typename... Index>
    FLASH_HOST_DEVICE RowOf<Element> row(Index... index) const {
        static_assert(sizeof...(Index) == kDims - 1);
        int64_t offset = 0;
        bool inside = true;
        [[maybe_unused]] int axis = 0;
        (add(offset, inside, axis++, index), ...);
        return {inside ? data + offset : data, inside ? size[kDims - 1] : 0};
    }

    // An element of a row.
    template <typename Index>
    FLASH_HOST_DEVICE auto in_row(const RowOf<Element> &row, Index index) const {
        return in_row(row, NotNegative<Index>{index < 0 ? Index(index + size[kDims - 1]) : index});
    }
    template <typename Index>
    FLASH_HOST_DEVICE auto in_row(const RowOf<Element> &row, NotNegative<Index> index) const {
        using Unsigned = std::make_unsigned_t<Index>;
        using Value = decltype(value_of(Element{}));
        if (Unsigned(index.value) >= Unsigned(row.size)) return Value{};
        return Value(value_of(row.data[int64_t(int(index.value)) * stride[kDims - 1]]));
    }

    // Where that element lies; -1: outside of the tensor.
    template <typename... Index>
    FLASH_HOST_DEVICE int64_t place(Index... index) const {
        static_assert(sizeof...(Index) == kDims);
        int64_t offset = 0;
        bool inside = true;
        [[maybe_unused]] int axis = 0;
        (add(offset, inside, axis++, index), ...);
        return inside ? offset : -1;
    }

  private:
    template <typename Index>
    FLASH_HOST_DEVICE void add(int64_t &offset, bool &inside, int axis, Index index) const {
        add(offset, inside, axis, NotNegative<Index>{index < 0 ? Index(index + size[axis]) : index});
    }
    template <typename Index>
    FLASH_HOST_DEVICE void add(int64_t &offset, bool &inside, int axis, NotNegative<Index> index) const {
        // One that was below 0 and still is has its largest bit set.
        using Unsigned = std::make_unsigned_t<Index>;
        inside = inside && Unsigned(index.value) < Unsigned(size[axis]);
        // What is inside has 32 bits; of what is not, no offset is used.
        offset += int64_t(int(index.value)) * stride[axis];
    }
};

// One of a launch's arguments, as the kernel reads it.
template <typename Element, int kDims>
Tensor<Element, kDims> tensor(const CapturedTensor &given) {
    static_assert(kDims <= kMaxCapturedDims);
    Tensor<Element, kDims> made{static_cast<const Element *>(given.data), {}, {}};
    for (int axis = 0; axis < kDims; ++axis) {
        made.stride[axis] = given.strides[axis];
        made.size[axis] = given.sizes[axis];
    }
    return made;
}

// What is known of a score before it is there: an element of a row that was read ahead, and what follows from
// the distance between key and query.
struct Ahead {
    float streamed;
    float diagonal;
};

// ---------------------------------------------------------------------- gradients
// A number as a type.
template <int kNumber>
struct Place {
    static constexpr int number = kNumber;
};

// Of a captured tensor whose gradient is wanted: how often one score loads elements of it, and which of the
// score's indices are indices of it, so that scores which differ in them load different elements.
struct Gathered {
    int loads;
    bool by_b, by_h, by_q, by_k;
};

// ---------------------------------------------------------------------- whole numbers
FLASH_HOST_DEVICE int64_t add(int64_t a, int64_t b) { return int64_t(uint64_t(a) + uint64_t(b)); }
FLASH_HOST_DEVICE int64_t sub(int64_t a, int64_t b) { return int64_t(uint64_t(a) - uint64_t(b)); }
FLASH_HOST_DEVICE int64_t mul(int64_t a, int64_t b) { return int64_t(uint64_t(a) * uint64_t(b)); }
FLASH_HOST_DEVICE int64_t negative(int64_t a) { return int64_t(0 - uint64_t(a)); }
FLASH_HOST_DEVICE int negative(int a) { return -a; }
FLASH_HOST_DEVICE int64_t absolute(int64_t a) { return a < 0 ? negative(a) : a; }
FLASH_HOST_DEVICE int absolute(int a) { return a < 0 ? -a : a; }

template <typename Int>
FLASH_HOST_DEVICE std::enable_if_t<std::is_integral_v<Int>, Int> floor_divide(Int a, Int b) {
    if (b == 0) return 0;
    if (b == -1) return Int(0 - std::make_unsigned_t<Int>(a));
    const Int quotient = a / b;
    return quotient - (a % b != 0 && (a < 0) != (b < 0));
}

template <typename Int>
FLASH_HOST_DEVICE std::enable_if_t<std::is_integral_v<Int>, Int> remainder(Int a, Int b) {
    if (b == 0 || b == -1) return 0;
    const Int rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

FLASH_HOST_DEVICE int64_t shift_left(int64_t a, int64_t count) {
    return count < 0 || count > 63 ? 0 : int64_t(uint64_t(a) << count);
}
FLASH_HOST_DEVICE int64_t shift_right(int64_t a, int64_t count) {
    return a >> (count < 0 || count > 63 ? 63 : count);
}

FLASH_HOST_DEVICE int64_t to_int(float x) {
    // No branches: of NaN, which is neither, 0.
    constexpr float kLargest = float(kLargestInt);
    const int64_t within = int64_t(x > -kLargest && x < kLargest ? x : 0.0f);
    const int64_t beyond = x >= kLargest ? kLargestInt : within;
    return x <= -kLargest ? -kLargestInt : beyond;
}

// ---------------------------------------------------------------------- real numbers
// NaN wins, as in PyTorch.
template <typename Number>
FLASH_HOST_DEVICE Number minimum(Number a, Number b) {
    return a != a || a < b ? a : b;
}
template <typename Number>
FLASH_HOST_DEVICE Number maximum(Number a, Number b) {
    return a != a || a > b ? a : b;
}

FLASH_HOST_DEVICE float remainder(float a, float b) {
    const float rest = fmodf(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

FLASH_HOST_DEVICE float floor_divide(float a, float b) {
    if (b == 0) return a / b;
    const float rest = fmodf(a, b);
    float quotient = (a - rest) / b;
    if (rest != 0 && (rest < 0) != (b < 0)) quotient -= 1.0f;
    if (quotient == 0) return copysignf(0.0f, a / b);
    const float whole = floorf(quotient);
    return quotient - whole > 0.5f ? whole + 1.0f : whole;
}

// x / by, rounded as a division is, without one's branches. `inverse`: 1 / by, rounded; neither is near the
// ends of the range, and `by` has not ones alone in its mantissa (Markstein).
FLASH_HOST_DEVICE float divided(float x, float by, float inverse) {
    const float near = x * inverse;
    const float rest = fmaf(-near, by, x);
    const float refined = fmaf(rest, inverse, near);
    // Without a rest it would lose the sign of 0; beyond the range it is NaN.
    return fabsf(rest) > 0 && refined == refined ? refined : near;
}

FLASH_HOST_DEVICE float absolute(float x) { return fabsf(x); }
FLASH_HOST_DEVICE float exp(float x) { return expf(x); }
FLASH_HOST_DEVICE float exp2(float x) { return exp2f(x); }
FLASH_HOST_DEVICE float expm1(float x) { return expm1f(x); }
FLASH_HOST_DEVICE float log(float x) { return logf(x); }
FLASH_HOST_DEVICE float log2(float x) { return log2f(x); }
FLASH_HOST_DEVICE float log1p(float x) { return log1pf(x); }
FLASH_HOST_DEVICE float sqrt(float x) { return sqrtf(x); }
FLASH_HOST_DEVICE float rsqrt(float x) {
#if defined(__CUDA_ARCH__)
    return rsqrtf(x);
#else
    return 1.0f / sqrtf(x);
#endif
}
FLASH_HOST_DEVICE float tanh(float x) { return softcap_tanh(x); }
FLASH_HOST_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
FLASH_HOST_DEVICE float erf(float x) { return erff(x); }
FLASH_HOST_DEVICE float sin(float x) { return sinf(x); }
FLASH_HOST_DEVICE float cos(float x) { return cosf(x); }
FLASH_HOST_DEVICE float floor(float x) { return floorf(x); }
FLASH_HOST_DEVICE float ceil(float x) { return ceilf(x); }
FLASH_HOST_DEVICE float trunc(float x) { return truncf(x); }
FLASH_HOST_DEVICE float round_to_even(float x) { return rintf(x); }
FLASH_HOST_DEVICE float power(float a, float b) { return powf(a, b); }
FLASH_HOST_DEVICE float random(int64_t seed, int64_t b, int64_t h, int64_t q, int64_t k) {
    return random_real(uint64_t(seed), uint32_t(b), uint32_t(h), uint32_t(q), uint32_t(k));
}

}  // namespace flash::mods
