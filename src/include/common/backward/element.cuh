// Two packed elements as float32.
#pragma once

#include "common/cuda_utils.cuh"
#include "flash_attention.cuh"

namespace flash {

template <DType kDType>
FLASH_DEVICE float2 unpack(uint32_t packed) {
    if constexpr (kDType == DType::BF16) {
        return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
    } else {
        float2 value;
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
            : "=f"(value.x), "=f"(value.y)
            : "r"(packed));
        return value;
    }
}

}  // namespace flash
