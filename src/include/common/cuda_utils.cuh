// Function qualifiers and small integer helpers.
//
// Headers that only compute layouts use nothing but FLASH_HOST_DEVICE, so that a plain C++
// compiler builds them too and the host tests (tests/cpp) run where there is no CUDA.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FLASH_HOST_DEVICE __host__ __device__ __forceinline__
#define FLASH_DEVICE __device__ __forceinline__
#else
#define FLASH_HOST_DEVICE inline
#endif

namespace flash {

inline constexpr int kWarpSize = 32;
inline constexpr int64_t kMaxBlocks = (int64_t(1) << 31) - 1;  // of a one-dimensional grid
inline constexpr int kSmemBanks = 32;                          // of 4 bytes each
inline constexpr int kChunkBytes = 16;   // what one thread copies at once, and one ldmatrix row
inline constexpr int kElementBytes = 2;  // fp16 and bf16
inline constexpr int kChunkElements = kChunkBytes / kElementBytes;

// For numbers that are not negative; cannot overflow.
FLASH_HOST_DEVICE constexpr int ceil_div(int a, int b) { return a / b + (a % b != 0); }
FLASH_HOST_DEVICE constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

FLASH_HOST_DEVICE constexpr int min_of(int a, int b) { return a < b ? a : b; }
FLASH_HOST_DEVICE constexpr int max_of(int a, int b) { return a > b ? a : b; }

// The least one, of positive numbers.
FLASH_HOST_DEVICE constexpr int common_multiple(int a, int b) {
    int multiple = a;
    while (multiple % b != 0) multiple += a;
    return multiple;
}

}  // namespace flash
