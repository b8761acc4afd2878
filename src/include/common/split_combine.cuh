// The second kernel of split keys: one output row from the parts that the thread blocks of the first have
// left in the workspace.
//
//     lse = log(sum over parts of exp(lse_i)  [+ exp(sink)]),     O = sum of exp(lse_i - lse) O_i
//
// One thread block a row. Its threads are (part_lanes, groups of 4 columns): each adds up every part_lanes-th
// part of four columns, then the lanes are added up in order. So the order of all sums is fixed by the number
// of parts, and equal calls give equal bits. Parts without a visible key have lse = -inf and do not count,
// whatever their O holds. All others do, also with a weight of 0: NaN in their O must show.
//
// This kernel takes little more than latencies. From sm_90 on it is set up while the first one ends (ptx.cuh:
// kernels of one stream): when all of that one's blocks have asked for their last keys (Hopper family) or
// have worked on them (Ampere family), not before, for early blocks crowd the few SMs that have room. The
// parts are on their way while their weights are worked out, by each warp for itself, so that none waits for
// another before its sums are complete.
//
// Another form, whose blocks go from row to row, a warp a row, is for launches that may use some SMs only,
// and for an O of float32: as many parts as there may be, one at least, are added up and not rounded.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "common/combined_rows.cuh"
#include "common/cuda_utils.cuh"
#include "common/early_launch.cuh"
#include "common/ptx.cuh"
#include "common/rows_of_none.cuh"
#include "common/sequence_rows.cuh"
#include "common/trace.cuh"
#include "flash_attention.cuh"

namespace flash {

inline constexpr int kCombineThreads = 256;
inline constexpr int kPartsAhead = 32;  // of a row, read before their weights are known
inline constexpr int kMaxSplits = 256;  // flash_helpers.select.splits.MAX_SPLITS

// The same on every lane of the warp: `own` of all lanes joined in a fixed order.
template <typename Join>
FLASH_DEVICE float warp_reduce(float own, Join join) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        own = join(own, __shfl_xor_sync(kAllLanes, own, distance));
    }
    return own;
}

// Writes the weights of all parts to `smem_weights`, -1 for parts that do not count. By one warp, all of
// whose lanes then see them. Returns the log-sum-exp of the row.
FLASH_DEVICE float weigh_parts(const CombineArgs &args, int64_t row_index, float sink, float *smem_weights) {
    const int lane = threadIdx.x % kWarpSize;
    constexpr int kMost = kMaxSplits / kWarpSize;  // parts of a lane
    const int n = ceil_div(args.n_splits, kWarpSize);
    float lse[kMost];
    float largest = sink;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        if (i >= n) break;
        const int part = lane + i * kWarpSize;
        lse[i] = part < args.n_splits ? args.partial_lse[part * args.total_rows + row_index] : -INFINITY;
        largest = fmaxf(largest, lse[i]);
    }
    largest = warp_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
    const float reference = largest == -INFINITY ? 0.0f : largest;  // not (-inf) - (-inf)
    float own_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        if (i >= n) break;
        own_sum += expf(lse[i] - reference);
    }
    const float sink_weight = sink == reference ? 1.0f : expf(sink - reference);  // also of a sink of inf
    const float sum = warp_reduce(own_sum, [](float a, float b) { return a + b; }) + sink_weight;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        if (i >= n) break;
        const int part = lane + i * kWarpSize;
        if (part < args.n_splits) {
            smem_weights[part] = lse[i] == -INFINITY ? -1.0f : expf(lse[i] - reference) / sum;
        }
    }
    __syncwarp();  // all weights are there
    return sum == 0.0f ? -INFINITY : reference + logf(sum);
}

// O += weight O_i of four columns. A negative weight: the part does not count, whatever O_i is.
FLASH_DEVICE void add_part(float4 &o, float weight, const float4 &o_i) {
    if (weight < 0.0f) return;
    o.x += weight * o_i.x;
    o.y += weight * o_i.y;
    o.z += weight * o_i.z;
    o.w += weight * o_i.w;
}

// Four columns of some parts of a row. kAhead are on their way at a time, as many as registers allow: one
// after the other each would take a latency.
template <int kAhead>
struct PartsAhead {
    float4 parts[kAhead];

    FLASH_DEVICE void load(const float *part, int64_t part_size, int begin, int n_parts) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (begin + i < n_parts) {
                parts[i] = *reinterpret_cast<const float4 *>(part + (begin + i) * part_size);
            }
        }
    }
    FLASH_DEVICE void add_to(float4 &o, const float *weights, int begin, int n_parts) const {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (begin + i < n_parts) add_part(o, weights[begin + i], parts[i]);
        }
    }
};

// Of all parts, added up in their order by one lane.
template <int kAhead>
FLASH_DEVICE float4 sum_of_parts(const float *part, int64_t part_size, int n_parts, const float *weights) {
    float4 o{};
#pragma unroll 1
    for (int begin = 0; begin < n_parts; begin += kAhead) {
        PartsAhead<kAhead> ahead;
        ahead.load(part, part_size, begin, n_parts);
        ahead.add_to(o, weights, begin, n_parts);
    }
    return o;
}

// kDHeadV: the largest d_head_v. kVarlen: queries may be packed.
template <DType kDType, int kDHeadV, bool kVarlen>
__global__ void __launch_bounds__(kCombineThreads)
    split_combine_kernel(const __grid_constant__ CombineArgs args) {
    constexpr int columns = 4;  // of a thread: 16 bytes of a part
    constexpr int groups = kDHeadV <= 64 ? 16 : kDHeadV <= 128 ? 32 : 64;
    constexpr int part_lanes = kCombineThreads / groups;
    constexpr int parts_ahead = kPartsAhead / part_lanes;  // of a thread
    static_assert(kDHeadV <= groups * columns, "d_head_v is at most 256");
    __shared__ float smem_weights[kCombineThreads / kWarpSize][kMaxSplits];  // of each warp
    __shared__ float4 smem_sums[part_lanes][groups];

    stamp(TracedKernel::COMBINE, TraceEvent::BEGIN);
    launch_dependents();
    const unsigned row_index = blockIdx.x;  // in (batch, n_heads, seq_len_q)
    const int row = static_cast<int>(row_index % args.seq_len_q);
    const int head = static_cast<int>(row_index / args.seq_len_q % args.n_heads);
    const int batch = static_cast<int>(row_index / args.seq_len_q / args.n_heads);
    const int thread = threadIdx.x;
    const int column = thread % groups * columns;
    const int lane = thread / groups;
    const bool in_row = column < args.d_head_v;
    const float *part = args.partial_o + int64_t{row_index} * args.d_head_v + column;
    const int64_t part_size = args.total_rows * args.d_head_v;
    wait_for_prerequisites();
    stamp(TracedKernel::COMBINE, TraceEvent::MAY_READ);
    if constexpr (kVarlen) {
        clear_rows_of_none(args, args.O, args.O_strides, args.batch, args.n_heads,
                           args.d_head_v / kChunkElements, thread, kCombineThreads);
    }
    const int *cu_seqlens_q = kVarlen ? args.cu_seqlens_q : nullptr;
    const SequenceRows rows = sequence_rows(cu_seqlens_q, nullptr, args.seq_len_q, args.rows_q, batch);
    if (row >= rows.n_rows) return;

    float4 first_parts[parts_ahead];
#pragma unroll
    for (int i = 0; i < parts_ahead; ++i) {
        const int at = lane + i * part_lanes;
        if (in_row && at < args.n_splits) {
            first_parts[i] = *reinterpret_cast<const float4 *>(part + at * part_size);
        }
    }
    float *weights = smem_weights[thread / kWarpSize];
    const float sink = args.sinks != nullptr ? args.sinks[head] : -INFINITY;
    const float lse = weigh_parts(args, row_index, sink, weights);
    stamp(TracedKernel::COMBINE, TraceEvent::FIRST_TILE);
    if (thread == 0 && args.lse != nullptr) {
        args.lse[lse_begin(cu_seqlens_q != nullptr, rows, args.n_heads, head, args.seq_len_q, args.total_q) +
                 row] = lse;
    }

    // ---------------------------------------------------------------- O
    float4 o{};
    if (in_row) {
#pragma unroll
        for (int i = 0; i < parts_ahead; ++i) {
            const int at = lane + i * part_lanes;
            if (at < args.n_splits) add_part(o, weights[at], first_parts[i]);
        }
#pragma unroll 4
        for (int at = lane + kPartsAhead; at < args.n_splits; at += part_lanes) {
            add_part(o, weights[at], *reinterpret_cast<const float4 *>(part + at * part_size));
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
    stamp(TracedKernel::COMBINE, TraceEvent::STORED);
}

inline constexpr int kCombineRows = 32;  // that a block has in hand, one a warp

template <DType kDType, bool kVarlen>
__global__ void __launch_bounds__(kCombineRows *kWarpSize)
    split_combine_rows_kernel(const __grid_constant__ CombineArgs args) {
    __shared__ float smem_weights[kCombineRows][kMaxSplits];
    constexpr int columns = 4;  // of a lane at a time: 16 bytes of a part
    const int lane = threadIdx.x % kWarpSize;
    float *weights = smem_weights[threadIdx.x / kWarpSize];
    const int64_t part_size = args.total_rows * args.d_head_v;
    each_combined_row<kVarlen, kCombineRows>(args, [&](const CombinedRow &row) {
        __syncwarp();  // all lanes have read the weights of the row before
        const float sink = args.sinks != nullptr ? args.sinks[row.head] : -INFINITY;
        const float lse = weigh_parts(args, row.index, sink, weights);
        if (lane == 0 && args.lse != nullptr) args.lse[row.lse] = lse;
        for (int column = lane * columns; column < args.d_head_v; column += kWarpSize * columns) {
            const float *part = args.partial_o + row.index * args.d_head_v + column;
            store_columns<kDType>(args.O, args.O_float32, row.first + column,
                                  sum_of_parts<4>(part, part_size, args.n_splits, weights));
        }
    });
}

// Launches the kernel behind the one that fills problem.partial_o and problem.partial_lse, which was launched
// into the same stream just before. kTarget: what both are compiled for, 90 for sm_90.
template <DType kDType, int kDHeadV, ForwardTraits TRAITS, int kTarget>
int launch_split_combine(const ForwardProblem &problem, cudaStream_t stream) {
    CombineArgs args = combine_args<TRAITS>(problem);
    if (args.total_rows > kMaxBlocks) return cudaErrorInvalidConfiguration;
    void *parameters[] = {&args};
    const void *rows_kernel =
        reinterpret_cast<const void *>(&split_combine_rows_kernel<kDType, TRAITS.varlen>);
    cudaError_t error = cudaSuccess;
    if (problem.n_sms > 0 || problem.o_float32) {
        error = launch_combined_rows<kTarget>(rows_kernel, problem, args.total_rows, kCombineRows, stream,
                                              parameters);
    } else {
        error = launch_kernel<kTarget >= 90>(
            reinterpret_cast<const void *>(&split_combine_kernel<kDType, kDHeadV, TRAITS.varlen>),
            static_cast<unsigned>(args.total_rows), kCombineThreads, 0, stream, parameters);
    }
    if (error != cudaSuccess) cudaGetLastError();  // reported here: the next launch starts afresh
    return error;
}

}  // namespace flash
