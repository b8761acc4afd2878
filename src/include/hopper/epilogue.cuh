// The end of a work item: O divided by the row sums and rounded, the log-sum-exp, and both on their way to
// global memory.
#pragma once

#include <cmath>

#include "hopper/forward_kernel_args.cuh"
#include "hopper/layout.cuh"
#include "hopper/pipeline.cuh"

namespace flash::hopper {

// What the softmax leaves behind, by value: with next_item the next item's softmax starts before this one is
// stored.
struct RowState {
    float sum[2];        // the thread's share
    float reference[2];  //
};

// Stages O (64, d_v) of one warpgroup in shared memory, in the layout of Q's slot.
template <DType kDType, int B_r, int d_v>
FLASH_DEVICE void stage_output(const float (&rmem_O)[d_v / 2], const float (&factor)[2], uint32_t smem_O,
                               int first_row, int lane) {
    const int row = lane & 15;
#pragma unroll
    for (int j = 0; j < d_v / 16; ++j) {  // 16 columns: four 8x8 matrices of the warp's 16 rows
        const float *o = rmem_O + 8 * j;
        const uint32_t chunk = 2 * j + (lane >> 4);
        stmatrix_x4(smem_O + chunk_offset(B_r, first_row + row, chunk),
                    pack<kDType>(o[0] * factor[0], o[1] * factor[0]),
                    pack<kDType>(o[2] * factor[1], o[3] * factor[1]),
                    pack<kDType>(o[4] * factor[0], o[5] * factor[0]),
                    pack<kDType>(o[6] * factor[1], o[7] * factor[1]));
    }
}

// A 4x4 transpose of words inside each group of four lanes: lane q's word i becomes lane i's word q.
FLASH_DEVICE void transpose_quad(uint32_t (&v)[4], int quad_lane) {
    const bool odd = quad_lane & 1, upper = quad_lane & 2;
    uint32_t a = odd ? v[0] : v[1], b = odd ? v[2] : v[3];
    a = __shfl_xor_sync(kFullWarp, a, 1);
    b = __shfl_xor_sync(kFullWarp, b, 1);
    if (odd) {
        v[0] = a;
        v[2] = b;
    } else {
        v[1] = a;
        v[3] = b;
    }
    a = upper ? v[0] : v[2];
    b = upper ? v[1] : v[3];
    a = __shfl_xor_sync(kFullWarp, a, 2);
    b = __shfl_xor_sync(kFullWarp, b, 2);
    if (upper) {
        v[0] = a;
        v[1] = b;
    } else {
        v[2] = a;
        v[3] = b;
    }
}

// Stores O (64, d_v) of one warpgroup from registers, 16 bytes a lane: each lane owns two neighbouring
// columns of every eight, and after the transpose eight neighbouring ones of 32. Rows past the end are left
// out.
template <DType kDType, int d_v>
FLASH_DEVICE void store_output(const float (&rmem_O)[d_v / 2], const float (&factor)[2],
                               const ForwardKernelArgs &args, const WorkItem &item, int first_row, int lane) {
    const int quad_lane = lane & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = first_row + 8 * r;
        uint16_t *gmem_O = static_cast<uint16_t *>(args.o) + item.batch * args.o_strides.batch +
                           static_cast<int64_t>(row) * args.o_strides.seq + item.head * args.o_strides.head +
                           quad_lane * 8;
#pragma unroll
        for (int group = 0; group < d_v / 32; ++group) {
            uint32_t v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int element = 4 * (4 * group + i) + 2 * r;
                v[i] = pack<kDType>(rmem_O[element] * factor[r], rmem_O[element + 1] * factor[r]);
            }
            transpose_quad(v, quad_lane);
            if (row < args.work.seq_len_q) store_global_streaming(gmem_O + group * 32, v);
        }
    }
}

// Normalises O and sends it and the LSE out. A row without keys has O = 0 and LSE = -inf.
template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS, int n>
FLASH_DEVICE void finish_item(const float (&rmem_O)[n], const RowState &state, const ForwardKernelArgs &args,
                              const SharedMemory<CFG, TRAITS> &smem, const WorkItem &item, uint32_t q_slot,
                              int warpgroup, int warp, int lane) {
    using Static = StaticForwardKernelConfig<CFG, TRAITS>;
    constexpr float kLn2 = 0.69314718f;
    const int row_of_warp = warpgroup * kWarpgroupRows + warp * 16;
    const int row0 = item.q_block * Static::B_r + row_of_warp + (lane >> 2);
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = state.sum[r];
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        sum += __shfl_xor_sync(kFullWarp, sum, 2);
        const bool empty = sum == 0.f;  // NaN is not empty: it must show
        factor[r] = empty ? 0.f : __fdividef(1.f, sum);
        const int row = row0 + 8 * r;
        if (args.lse != nullptr && (lane & 3) == 0 && row < args.work.seq_len_q) {
            args.lse[(static_cast<int64_t>(item.batch) * args.work.n_heads + item.head) *
                         args.work.seq_len_q +
                     row] = empty ? -INFINITY : state.reference[r] * args.scale_log2 * kLn2 + __logf(sum);
        }
    }
    if constexpr (CFG.direct_store) {
        store_output<CFG.dtype, Static::d_head_v>(rmem_O, factor, args, item, row0, lane);
    } else {
        stage_output<CFG.dtype, Static::B_r, Static::d_head_v>(rmem_O, factor, smem.q(q_slot), row_of_warp,
                                                               lane);
        fence_async_proxy();  // the store thread's bulk copies must see what was staged
        __syncwarp();         // ... by every lane
        if (lane == 0) mbarrier_arrive(smem.o_staged(q_slot));
    }
}

// The query blocks before first_q_block see no key (causal, seq_len_q > seq_len_k, or no keys at all):
// O = 0 and LSE = -inf. They are no work items; the threads of the producer's last two warps, which have
// nothing else to do, share them over the whole grid.
template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
FLASH_DEVICE void fill_rows_without_keys(const ForwardKernelArgs &args, int thread, int n_threads) {
    using Static = StaticForwardKernelConfig<CFG, TRAITS>;
    constexpr int kChunks = Static::d_head_v / kChunkColumns;
    const int64_t n_rows = min(args.work.first_q_block * Static::B_r, args.work.seq_len_q);
    const int64_t n_chunks = n_rows * args.work.n_head_pairs * kChunks;
    const uint32_t zeros[4] = {0, 0, 0, 0};
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * n_threads + thread; i < n_chunks;
         i += static_cast<int64_t>(gridDim.x) * n_threads) {
        const int chunk = static_cast<int>(i % kChunks);
        const int64_t row = i / kChunks % n_rows, pair = i / kChunks / n_rows;
        const int64_t batch = pair / args.work.n_heads, head = pair % args.work.n_heads;
        store_global_streaming(static_cast<uint16_t *>(args.o) + batch * args.o_strides.batch +
                                   row * args.o_strides.seq + head * args.o_strides.head +
                                   chunk * kChunkColumns,
                               zeros);
        if (chunk == 0 && args.lse != nullptr) args.lse[pair * args.work.seq_len_q + row] = -INFINITY;
    }
}

}  // namespace flash::hopper
