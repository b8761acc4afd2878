// What the four lanes of a quad, which share the rows of an accumulator (fragments.cuh), tell each other.
#pragma once

#include "common/ptx.cuh"

namespace flash {

FLASH_DEVICE float quad_maximum(float x) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
    return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

FLASH_DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(kAllLanes, x, 1);
    return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// A 4x4 transpose of words inside each group of four lanes: lane q's word i becomes lane i's word q.
FLASH_DEVICE void transpose_quad(uint32_t (&v)[4], int quad_lane) {
    const bool odd = quad_lane & 1, upper = quad_lane & 2;
    uint32_t a = odd ? v[0] : v[1], b = odd ? v[2] : v[3];
    a = __shfl_xor_sync(kAllLanes, a, 1);
    b = __shfl_xor_sync(kAllLanes, b, 1);
    if (odd) {
        v[0] = a;
        v[2] = b;
    } else {
        v[1] = a;
        v[3] = b;
    }
    a = upper ? v[0] : v[2];
    b = upper ? v[1] : v[3];
    a = __shfl_xor_sync(kAllLanes, a, 2);
    b = __shfl_xor_sync(kAllLanes, b, 2);
    if (upper) {
        v[0] = a;
        v[1] = b;
    } else {
        v[2] = a;
        v[3] = b;
    }
}

}  // namespace flash
