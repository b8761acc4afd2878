// The second kernel of split keys: one output row from the parts that the thread blocks of the first have
// left in the workspace.
//
//     lse = log(sum over parts of exp(lse_i)  [+ exp(sink)]),     O = sum of exp(lse_i - lse) O_i
//
// One thread block a row. Its threads are (part_lanes, groups of 4 columns): each adds up every part_lanes-th
// part of four columns, then the lanes are added up in order. So the order of all sums is fixed by the number
// of parts, and equal calls give equal bits. Parts without a visible key have lse = -inf and do not count,
// whatever their O holds.
//
// This kernel takes little more than latencies. From sm_90 on it is set up while the first one still runs
// (ptx.cuh: kernels of one stream), and the first parts are on their way while their weights are worked out.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "cuda_utils.cuh"
#include "early_launch.cuh"
#include "flash_attention.cuh"
#include "ptx.cuh"
#include "sequence_rows.cuh"

namespace flash {

inline constexpr int kCombineThreads = 256;
inline constexpr int kPartsAhead = 2;   // of a thread, read before their weights are known
inline constexpr int kMaxSplits = 256;  // flash_helpers.splits.MAX_SPLITS
static_assert(kMaxSplits <= kCombineThreads, "one thread computes the weight of one part");

struct SplitCombineArgs {
    const float *partial_O;    // (n_splits, batch, n_heads, seq_len_q, d_head_v)
    const float *partial_lse;  // (n_splits, batch, n_heads, seq_len_q)
    void *O;                   // (batch, seq_len_q, n_heads, d_head_v)
    float *lse;                // (batch, n_heads, seq_len_q), or (n_heads, total_q); nullptr: not wanted
    const float *sinks;        // (n_heads) or nullptr
    const int *cu_seqlens_q;   // (batch + 1) or nullptr
    TensorStrides O_strides;
    int64_t total_rows;  // batch * n_heads * seq_len_q
    int64_t total_q;
    int n_splits, n_heads, seq_len_q, d_head_v;
};

// The same on every thread of the block; `own` of all threads joined in a fixed order.
template <typename Join>
FLASH_DEVICE float block_reduce(float own, Join join) {
    constexpr int warps = kCombineThreads / kWarpSize;
    __shared__ float smem_warps[warps];
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        own = join(own, __shfl_xor_sync(0xffffffff, own, distance));
    }
    if (threadIdx.x % kWarpSize == 0) smem_warps[threadIdx.x / kWarpSize] = own;
    __syncthreads();  // all warps' values are there
    float all = smem_warps[0];
#pragma unroll
    for (int i = 1; i < warps; ++i) all = join(all, smem_warps[i]);
    __syncthreads();  // smem_warps may be used again
    return all;
}

// kDHeadV: the largest d_head_v.
template <DType kDType, int kDHeadV>
__global__ void __launch_bounds__(kCombineThreads)
    split_combine_kernel(const __grid_constant__ SplitCombineArgs args) {
    constexpr int columns = 4;  // of a thread: 16 bytes of a part
    constexpr int groups = kDHeadV <= 64 ? 16 : kDHeadV <= 128 ? 32 : 64;
    constexpr int part_lanes = kCombineThreads / groups;
    static_assert(kDHeadV <= groups * columns, "d_head_v is at most 256");
    __shared__ float smem_weights[kMaxSplits];
    __shared__ float4 smem_sums[part_lanes][groups];

    launch_dependents();
    wait_for_prerequisites();
    const int64_t row_index = blockIdx.x;  // in (batch, n_heads, seq_len_q)
    const int row = static_cast<int>(row_index % args.seq_len_q);
    const int head = static_cast<int>(row_index / args.seq_len_q % args.n_heads);
    const int batch = static_cast<int>(row_index / args.seq_len_q / args.n_heads);
    const SequenceRows rows = sequence_queries(args.cu_seqlens_q, args.seq_len_q, batch);
    if (row >= rows.n_rows) return;

    const int thread = threadIdx.x;
    const int column = thread % groups * columns;
    const int lane = thread / groups;
    const bool in_row = column < args.d_head_v;
    const float *part = args.partial_O + row_index * args.d_head_v + column;
    const int64_t part_size = args.total_rows * args.d_head_v;
    float4 first_parts[kPartsAhead];
#pragma unroll
    for (int i = 0; i < kPartsAhead; ++i) {
        const int at = lane + i * part_lanes;
        if (in_row && at < args.n_splits) {
            first_parts[i] = *reinterpret_cast<const float4 *>(part + at * part_size);
        }
    }

    // ---------------------------------------------------------------- weights
    const float own_lse =
        thread < args.n_splits ? args.partial_lse[thread * args.total_rows + row_index] : -INFINITY;
    const float sink = args.sinks != nullptr ? args.sinks[head] : -INFINITY;
    const float largest = fmaxf(block_reduce(own_lse, [](float a, float b) { return fmaxf(a, b); }), sink);
    const float reference = largest == -INFINITY ? 0.0f : largest;  // not (-inf) - (-inf)
    const float own_weight = expf(own_lse - reference);
    const float sum =
        block_reduce(own_weight, [](float a, float b) { return a + b; }) + expf(sink - reference);
    if (thread < args.n_splits) smem_weights[thread] = sum == 0.0f ? 0.0f : own_weight / sum;
    if (thread == 0 && args.lse != nullptr) {
        args.lse[lse_begin(args.cu_seqlens_q != nullptr, rows, args.n_heads, head, args.seq_len_q,
                           args.total_q) +
                 row] = sum == 0.0f ? -INFINITY : reference + logf(sum);
    }
    __syncthreads();  // all weights are there

    // ---------------------------------------------------------------- O
    float4 o{};
    const auto add = [&](float weight, const float4 &o_i) {
        if (weight == 0.0f) return;
        o.x += weight * o_i.x;
        o.y += weight * o_i.y;
        o.z += weight * o_i.z;
        o.w += weight * o_i.w;
    };
    if (in_row) {
#pragma unroll
        for (int i = 0; i < kPartsAhead; ++i) {
            const int at = lane + i * part_lanes;
            if (at < args.n_splits) add(smem_weights[at], first_parts[i]);
        }
#pragma unroll 4
        for (int at = lane + kPartsAhead * part_lanes; at < args.n_splits; at += part_lanes) {
            add(smem_weights[at], *reinterpret_cast<const float4 *>(part + at * part_size));
        }
    }
    smem_sums[lane][thread % groups] = o;
    __syncthreads();  // all lanes' sums are there
    if (lane != 0 || !in_row) return;
#pragma unroll
    for (int i = 1; i < part_lanes; ++i) {
        const float4 other = smem_sums[i][thread];
        o.x += other.x;
        o.y += other.y;
        o.z += other.z;
        o.w += other.w;
    }
    char *gmem =
        static_cast<char *>(args.O) + (rows.batch * args.O_strides.batch + head * args.O_strides.head +
                                       (int64_t(rows.first_row) + row) * args.O_strides.seq + column) *
                                          kElementBytes;
    *reinterpret_cast<uint2 *>(gmem) = make_uint2(pack<kDType>(o.x, o.y), pack<kDType>(o.z, o.w));
}

// Launches the kernel behind the one that fills problem.partial_o and problem.partial_lse, which was launched
// into the same stream just before. kTarget: what both are compiled for, 90 for sm_90.
template <DType kDType, int kDHeadV, ForwardTraits TRAITS, int kTarget>
int launch_split_combine(const ForwardProblem &problem, cudaStream_t stream) {
    const int64_t total_rows = int64_t(problem.batch) * problem.n_heads * problem.seq_len_q;
    if (total_rows > kMaxBlocks) return cudaErrorInvalidConfiguration;
    SplitCombineArgs args{
        .partial_O = problem.partial_o,
        .partial_lse = problem.partial_lse,
        .O = problem.o,
        .lse = problem.lse,
        .sinks = TRAITS.sinks ? problem.sinks : nullptr,
        .cu_seqlens_q = TRAITS.varlen ? problem.cu_seqlens_q : nullptr,
        .O_strides = problem.o_strides,
        .total_rows = total_rows,
        .total_q = problem.total_q,
        .n_splits = problem.n_splits,
        .n_heads = problem.n_heads,
        .seq_len_q = problem.seq_len_q,
        .d_head_v = problem.d_head_v,
    };
    void *parameters[] = {&args};
    const cudaError_t error = launch_kernel<kTarget >= 90>(
        reinterpret_cast<const void *>(&split_combine_kernel<kDType, kDHeadV>),
        static_cast<unsigned>(total_rows), kCombineThreads, 0, stream, parameters);
    if (error != cudaSuccess) cudaGetLastError();  // reported here: the next launch starts afresh
    return error;
}

}  // namespace flash
