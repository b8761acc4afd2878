// What the second kernels of parts share: their arguments, the walk over rows, and stores. The first kernel
// has left the parts of each row in the workspace; split_combine.cuh and chunk_combine.cuh say what parts
// are.
//
// A warp takes a row, and blocks go from row to row: launches that may use some SMs only have fewer blocks.
#pragma once

#include <cuda_runtime.h>

#include "common/cuda_utils.cuh"
#include "common/early_launch.cuh"
#include "common/ptx.cuh"
#include "common/rows_of_none.cuh"
#include "common/sequence_rows.cuh"
#include "flash_attention.cuh"

namespace flash {

struct CombineArgs {
    const float *partial_o;    // (n_splits, batch, n_heads, seq_len_q, d_head_v)
    const float *partial_lse;  // (n_splits, batch, n_heads, seq_len_q)
    void *O;                   // (batch, seq_len_q, n_heads, d_head_v)
    float *lse;                // (batch, n_heads, seq_len_q), or (n_heads, total_q); nullptr: not wanted
    const float *sinks;        // (n_heads) or nullptr
    const int *cu_seqlens_q;   // (batch + 1) or nullptr
    TensorStrides O_strides;
    int64_t total_rows;  // batch * n_heads * seq_len_q
    int64_t total_q;
    int n_splits, n_heads, seq_len_q, d_head_v;
    int batch, rows_q;  // where cu_seqlens_q is given; nameable_rows of q
    bool O_float32;     // O is float32, and not rounded
};

template <ForwardTraits TRAITS>
CombineArgs combine_args(const ForwardProblem &problem) {
    return {
        .partial_o = problem.partial_o,
        .partial_lse = problem.partial_lse,
        .O = problem.o,
        .lse = problem.lse,
        .sinks = TRAITS.sinks ? problem.sinks : nullptr,
        .cu_seqlens_q = problem.cu_seqlens_q,
        .O_strides = problem.o_strides,
        .total_rows = int64_t(problem.batch) * problem.n_heads * problem.seq_len_q,
        .total_q = problem.total_q,
        .n_splits = problem.n_splits,
        .n_heads = problem.n_heads,
        .seq_len_q = problem.seq_len_q,
        .d_head_v = problem.d_head_v,
        .batch = problem.batch,
        .rows_q = nameable_rows(problem.total_q),
        .O_float32 = problem.o_float32,
    };
}

// One row of O.
struct CombinedRow {
    int64_t index;  // in (batch, n_heads, seq_len_q)
    int64_t lse;    // place of its log-sum-exp
    int64_t first;  // element of O that it begins with
    int head;
};

// Calls `take` with each row of the warp's, and clears rows of no sequence. kWarps: of a block.
template <bool kVarlen, int kWarps, typename Take>
FLASH_DEVICE void each_combined_row(const CombineArgs &args, Take take) {
    const int warp = threadIdx.x / kWarpSize;
    wait_for_prerequisites();
    if constexpr (kVarlen) {
        const auto clear = [&]<typename Element>(Element) {
            const int n_chunks = args.d_head_v * static_cast<int>(sizeof(Element)) / kChunkBytes;
            clear_rows_of_none<Element>(args, args.O, args.O_strides, args.batch, args.n_heads, n_chunks,
                                        threadIdx.x, kWarps * kWarpSize);
        };
        if (args.O_float32) {
            clear(float{});
        } else {
            clear(uint16_t{});
        }
    }
    const int *cu_seqlens_q = kVarlen ? args.cu_seqlens_q : nullptr;
#pragma unroll 1
    for (int64_t row_index = int64_t{blockIdx.x} * kWarps + warp; row_index < args.total_rows;
         row_index += int64_t{gridDim.x} * kWarps) {
        const unsigned index = static_cast<unsigned>(row_index);
        const int row = static_cast<int>(index % args.seq_len_q);
        const int head = static_cast<int>(index / args.seq_len_q % args.n_heads);
        const int batch = static_cast<int>(index / args.seq_len_q / args.n_heads);
        const SequenceRows rows = sequence_rows(cu_seqlens_q, nullptr, args.seq_len_q, args.rows_q, batch);
        if (row >= rows.n_rows) continue;
        take(CombinedRow{
            .index = row_index,
            .lse =
                lse_begin(cu_seqlens_q != nullptr, rows, args.n_heads, head, args.seq_len_q, args.total_q) +
                row,
            .first = rows.batch * args.O_strides.batch + head * args.O_strides.head +
                     (int64_t(rows.first_row) + row) * args.O_strides.seq,
            .head = head,
        });
    }
}

// Four columns from element `first` of O on: 16 bytes, or 8.
template <DType kDType>
FLASH_DEVICE void store_columns(void *O, bool float32, int64_t first, const float4 &o) {
    if (float32) {
        *reinterpret_cast<float4 *>(static_cast<float *>(O) + first) = o;
    } else {
        char *gmem = static_cast<char *>(O) + first * kElementBytes;
        *reinterpret_cast<uint2 *>(gmem) = make_uint2(pack<kDType>(o.x, o.y), pack<kDType>(o.z, o.w));
    }
}

// Launches a kernel that goes from row to row, of `warps` warps a block, behind the one that fills the parts.
// Where some SMs only may be used not early: blocks that wait for the first kernel would take other SMs than
// that one's. kTarget: what both are compiled for, 90 for sm_90.
template <int kTarget>
cudaError_t launch_combined_rows(const void *kernel, const ForwardProblem &problem, int64_t total_rows,
                                 int warps, cudaStream_t stream, void **parameters) {
    const int blocks = ceil_div(static_cast<int>(total_rows), warps), threads = warps * kWarpSize;
    if (problem.n_sms > 0) {
        return launch_kernel<false>(kernel, static_cast<unsigned>(min_of(blocks, problem.n_sms)), threads, 0,
                                    stream, parameters);
    }
    return launch_kernel<kTarget >= 90>(kernel, static_cast<unsigned>(blocks), threads, 0, stream,
                                        parameters);
}

}  // namespace flash
