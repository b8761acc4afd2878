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

}  // namespace flash
