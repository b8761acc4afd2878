// In the place of the Hopper family's PTX instructions, for host tests of what needs none of them.
#pragma once

#include "common/ptx.cuh"

inline int max(int a, int b) { return a > b ? a : b; }

namespace flash::hopper {
inline uint32_t shift_right_clamped(uint32_t value, int n) { return n >= 32 ? 0 : value >> n; }
}  // namespace flash::hopper
