// dK and dV to global memory: rounded once, 16 bytes a lane, 64 bytes a row of a quad; or float32, 8 and 32.
#pragma once

#include "ampere/backward/block_work.cuh"
#include "ampere/backward/products.cuh"
#include "common/backward/row_store.cuh"
#include "common/backward/rows_of_none.cuh"

namespace flash::ampere {

// `first_column`: of the warp; `d`: of the tensor. Keys that no query sees get 0, whatever the sums hold.
template <typename Kernel, int kColumns, typename SumsOfRole>
FLASH_DEVICE void store_key_gradients(const SumsOfRole &sums, const BlockWork<Kernel> &work, void *tensor,
                                      const TensorStrides &given, int d, int first_column, float factor) {
    if (tensor == nullptr) return;
    constexpr bool kFloats = Kernel::traits.float_key_gradients;
    const int lane = work.lane;
    // row_0 and kElementBytes count elements of 16 bits.
    const TensorStrides doubled{2 * given.batch, 2 * given.seq, 2 * given.head};
    const TensorStrides &strides = kFloats ? doubled : given;
    char *row_0 = const_cast<char *>(work.row_0(tensor, strides, work.place.k_seq, work.place.kv_head));
    const int warp_key = work.first_key + work.group * Kernel::warp_keys + lane / 4;
#pragma unroll
    for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int key = warp_key + m * kMmaM + 8 * half;
            const bool exists = key < work.place.owned_keys;
            const bool seen = work.seen_keys.has(key) && !work.walk().ended();
            char *row = row_0 + key * strides.seq * kElementBytes;
            if constexpr (kFloats) {
#pragma unroll
                for (int n = 0; n < kColumns / kMmaN; ++n) {
                    const float *two = &sums.rmem[m][n][2 * half];
                    const float2 pair = seen ? make_float2(two[0] * factor, two[1] * factor) : float2{};
                    const int column = first_column + n * kMmaN;
                    if (exists && (!Kernel::traits.padded_head || column < d)) {
                        reinterpret_cast<float2 *>(row + column * sizeof(float))[lane % 4] = pair;
                    }
                }
            } else {
#pragma unroll
                for (int n = 0; n < kColumns / kMmaN; n += 4) {
                    Chunk chunk = row_chunk<Kernel::dtype>(sums.rmem[m], n, half, factor, lane);
                    if (!seen) chunk = Chunk{};
                    const int column = first_column + (n + lane % 4) * kMmaN;
                    if (exists && (!Kernel::traits.padded_head || column < d)) {
                        store_global(row + column * kElementBytes, chunk);
                    }
                }
            }
        }
    }
}

// Packed keys that belong to no sequence.
FLASH_DEVICE void clear_keys_of_none(const BackwardKernelArgs &args) {
    const int n_sequences = args.grid.total_heads / args.grid.n_heads;
    clear_gradient_rows_of_none(args.cu_seqlens_k, n_sequences, args.total_k, args.dK, args.dK_strides,
                                args.grid.n_heads, args.d_head);
    clear_gradient_rows_of_none(args.cu_seqlens_k, n_sequences, args.total_k, args.dV, args.dV_strides,
                                args.grid.n_heads, args.d_head_v);
}

}  // namespace flash::ampere
