// Packed tensors may have more rows than their sequences: padding before the first offset and behind the
// last. The thread blocks of the launch that writes O share these rows, a row a turn, and leave O = 0 and LSE
// = -inf there. Where there are none this costs two reads of offsets.
#pragma once

#include <cmath>

#include "common/cuda_utils.cuh"
#include "common/sequence_rows.cuh"
#include "flash_attention.cuh"

namespace flash {

// By `n_threads` threads of every block, of which this is number `thread`. `args`: the kernel's, with O's
// address and strides in `O` and `strides`; n_chunks: of a row of one head, 16 bytes each. Element: as large
// as one of O's.
template <typename Element = uint16_t, typename Args>
FLASH_DEVICE void clear_rows_of_none(const Args &args, void *O, const TensorStrides &strides, int batch,
                                     int n_heads, int n_chunks, int thread, int n_threads) {
    constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Element));  // of a chunk
    if (args.cu_seqlens_q == nullptr) return;
    const int before = row_offset(args.cu_seqlens_q[0], args.rows_q);
    const int behind = row_offset(args.cu_seqlens_q[batch], args.rows_q);
#pragma unroll 1
    for (int64_t i = blockIdx.x; i < before + (args.total_q - behind); i += gridDim.x) {
        const int64_t row = i < before ? i : behind + (i - before);
#pragma unroll 1
        for (int unit = thread; unit < n_heads * n_chunks; unit += n_threads) {
            const int head = unit / n_chunks, chunk = unit % n_chunks;
            Element *gmem = static_cast<Element *>(O) + row * strides.seq + head * strides.head;
            *reinterpret_cast<uint4 *>(gmem + chunk * kElements) = make_uint4(0, 0, 0, 0);
            if (chunk == 0 && args.lse != nullptr) args.lse[head * args.total_q + row] = -INFINITY;
        }
    }
}

}  // namespace flash
