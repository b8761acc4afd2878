// Where dK and dV of an item are, and the zeros of keys that no query sees.
#pragma once

#include <type_traits>

#include "hopper/backward/key_items.cuh"
#include "hopper/ptx_sm90.cuh"

namespace flash::hopper {

// An element of dk and dv in memory.
template <typename Kernel>
using KeyGradient = std::conditional_t<Kernel::traits.float_key_gradients, float, uint16_t>;

// Address of row `row` of the item's sequence, in dk or dv.
template <typename Kernel>
FLASH_DEVICE KeyGradient<Kernel> *gradient_row(void *gradient, const TensorStrides &strides,
                                               const BackwardKernelArgs &args, const BackwardItem &item,
                                               int row) {
    const bool packed = Kernel::traits.varlen && args.cu_seqlens_k != nullptr;
    return static_cast<KeyGradient<Kernel> *>(gradient) + (packed ? 0 : item.batch) * strides.batch +
           (int64_t{item.k_row} + row) * strides.seq + item.head * strides.head;
}

template <typename Kernel>
FLASH_DEVICE void clear_rows(void *gradient, const TensorStrides &strides, const BackwardKernelArgs &args,
                             const BackwardItem &item, int columns) {
    if (gradient == nullptr) return;
    const uint32_t zeros[4] = {0, 0, 0, 0};
    const int first_row = item.tile * Kernel::B_c;
    constexpr int kElements = kChunkBytes / sizeof(KeyGradient<Kernel>);
    const int chunks = columns / kElements, n_rows = min(Kernel::B_c, item.owned_rows - first_row);
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize; i < n_rows * chunks; i += kWarpSize) {
        const int row = first_row + i / chunks;
        store_global_streaming(
            gradient_row<Kernel>(gradient, strides, args, item, row) + i % chunks * kElements, zeros);
    }
}

// dK = dV = 0 of a tile of keys, by a whole warp.
template <typename Kernel>
FLASH_DEVICE void clear_item(const BackwardKernelArgs &args, const BackwardItem &item) {
    clear_rows<Kernel>(args.dk, args.dk_strides, args, item,
                       Kernel::traits.padded_head ? args.d_head : Kernel::d_head);
    clear_rows<Kernel>(args.dv, args.dv_strides, args, item,
                       Kernel::traits.padded_head ? args.d_head_v : Kernel::d_head_v);
}

}  // namespace flash::hopper
