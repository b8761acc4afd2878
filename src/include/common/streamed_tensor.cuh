// What is said of a tensor whose rows are streamed (flash_helpers/mods/ahead.py) to those who copy tiles of
// it.
#pragma once

#include "common/cuda_utils.cuh"

namespace flash::mods {

// Its number among the captured ones, how many dimensions it has, and which of them queries count. Keys count
// the last.
struct StreamedTensor {
    int number, n_dims, query_axis;
};

// Coordinates in up to two other dimensions.
struct OuterPlace {
    int batch = 0, head = 0;
};
FLASH_HOST_DEVICE OuterPlace outer_place() { return {}; }
FLASH_HOST_DEVICE OuterPlace outer_place(int head) { return {0, head}; }
FLASH_HOST_DEVICE OuterPlace outer_place(int batch, int head) { return {batch, head}; }

// An index of a dimension as a coordinate: outside of the tensor it is none of the copies' either. Along a
// dimension without a stride all lies at 0.
template <typename Tensor, typename Index>
FLASH_HOST_DEVICE int coordinate(const Tensor &tensor, int axis, Index index) {
    if (index < 0) index += tensor.size[axis];
    if (index < 0 || index >= tensor.size[axis]) return -1;
    return tensor.stride[axis] == 0 ? 0 : int(index);
}

inline constexpr int kCopiedDims = 4;  // of which copies are made; no place is asked for in others
FLASH_HOST_DEVICE OuterPlace outer_place(int, int, int) { return {}; }

}  // namespace flash::mods
