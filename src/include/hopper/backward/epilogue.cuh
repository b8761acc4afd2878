// The end of an item: gradients of a warpgroup's 64 rows go from registers to global memory, 16 bytes a lane.
// Each lane owns two neighbouring columns of every eight, and after a transpose among four lanes eight
// neighbouring ones of 32.
#pragma once

#include "common/quad.cuh"
#include "hopper/backward/empty_items.cuh"

namespace flash::hopper {

// Row r, 0 or 1, of the lane's two. `gmem`: the lane's first column. Columns past the tensor's are left out.
template <typename Kernel, int columns>
FLASH_DEVICE void store_gradient_row(const float (&rmem)[columns / 2], int r, float factor, uint16_t *gmem,
                                     int quad_lane, bool exists, int tensor_columns) {
#pragma unroll
    for (int group = 0; group < columns / 32; ++group) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int element = 4 * (4 * group + i) + 2 * r;
            words[i] = pack<Kernel::dtype>(rmem[element] * factor, rmem[element + 1] * factor);
        }
        transpose_quad(words, quad_lane);
        const bool in_head = !Kernel::traits.padded_head || group * 32 + quad_lane * 8 < tensor_columns;
        if (exists && in_head) store_global_streaming(gmem + group * 32, words);
    }
}

// The same in float32, not rounded: 8 bytes a lane, 32 of a row of a quad.
template <typename Kernel, int columns>
FLASH_DEVICE void store_float_row(const float (&rmem)[columns / 2], int r, float factor, float *gmem,
                                  int quad_lane, bool exists, int tensor_columns) {
#pragma unroll
    for (int tile = 0; tile < columns / 8; ++tile) {
        const int element = 4 * tile + 2 * r;
        const bool in_head = !Kernel::traits.padded_head || tile * 8 < tensor_columns;
        if (exists && in_head) {
            __stcs(reinterpret_cast<float2 *>(gmem + tile * 8 + quad_lane * 2),
                   make_float2(rmem[element] * factor, rmem[element + 1] * factor));
        }
    }
}

// dK or dV; `first_key`: of the lane's two rows, the upper one. Rows that the sequence does not own are left
// out.
template <typename Kernel, int columns>
FLASH_DEVICE void store_gradient(const float (&rmem)[columns / 2], float factor, void *gradient,
                                 const TensorStrides &strides, const BackwardKernelArgs &args,
                                 const BackwardItem &item, int first_key, int lane, int tensor_columns) {
    if (gradient == nullptr) return;
    const int quad_lane = lane & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int key = first_key + 8 * r;
        if constexpr (Kernel::traits.float_key_gradients) {
            float *gmem = gradient_row<Kernel>(gradient, strides, args, item, key);
            store_float_row<Kernel, columns>(rmem, r, factor, gmem, quad_lane, key < item.owned_rows,
                                             tensor_columns);
        } else {
            uint16_t *gmem = gradient_row<Kernel>(gradient, strides, args, item, key) + quad_lane * 8;
            store_gradient_row<Kernel, columns>(rmem, r, factor, gmem, quad_lane, key < item.owned_rows,
                                                tensor_columns);
        }
    }
}

}  // namespace flash::hopper
