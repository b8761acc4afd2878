// Packed tensors may have rows before the first offset and behind the last, which belong to no sequence.
// Their gradients are 0: the thread blocks of a launch share these rows, a row a turn.
#pragma once

#include "common/cuda_utils.cuh"
#include "common/sequence_rows.cuh"
#include "flash_attention.cuh"

namespace flash {

// By all threads of all blocks. `d`: of the tensor; nullptr: it is not wanted.
FLASH_DEVICE void clear_gradient_rows_of_none(const int *cu_seqlens, int n_sequences, int64_t total,
                                              void *tensor, const TensorStrides &strides, int n_heads,
                                              int d) {
    if (cu_seqlens == nullptr || tensor == nullptr) return;
    const int before = row_offset(cu_seqlens[0], nameable_rows(total));
    const int behind = row_offset(cu_seqlens[n_sequences], nameable_rows(total));
    const int chunks = d / kChunkElements;
#pragma unroll 1
    for (int64_t i = blockIdx.x; i < before + (total - behind); i += gridDim.x) {
        const int64_t row = i < before ? i : behind + (i - before);
#pragma unroll 1
        for (int unit = threadIdx.x; unit < n_heads * chunks; unit += blockDim.x) {
            uint16_t *gmem = static_cast<uint16_t *>(tensor) + row * strides.seq +
                             unit / chunks * strides.head + unit % chunks * kChunkElements;
            *reinterpret_cast<uint4 *>(gmem) = make_uint4(0, 0, 0, 0);
        }
    }
}

}  // namespace flash
