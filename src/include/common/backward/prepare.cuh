// Before the main kernel: of every row and head
//
//     delta    = rowsum(O * dO) - dLSE
//     lse_log2 = LSE * log2(e); +inf for a row that sees no key, whose P = 2^(S - LSE) is then 0
//
// and what the main kernel adds to begins as 0: the sums of dQ, the turns of ordered sums.
//
// One thread block works on kSumRows rows of one head; a row is read by as many lanes as it has chunks of 16
// bytes, rounded up to a power of 2.
#pragma once

#include <cmath>

#include "backward.cuh"
#include "common/backward/dq_sums.cuh"
#include "common/backward/element.cuh"
#include "common/cuda_utils.cuh"
#include "common/ptx.cuh"
#include "common/sequence_rows.cuh"
#include "common/softmax_scale.cuh"

namespace flash {

struct PrepareArgs {
    const void *O, *dO;
    const float *lse, *dlse;
    float *delta, *lse_log2;  // lse_log2: nullptr where it is not wanted
    float *dQ_sums;           // nullptr: nothing to clear
    int *turns;               // likewise
    int turns_per_group;      // of kSumRows rows of a head
    TensorStrides O_strides, dO_strides;
    int n_heads, n_groups;    // groups of kSumRows rows of the longest sequence
    int n_sequences;
    int seq_len_q;
    const int *cu_seqlens_q, *seqused_q;
    int64_t total_q;
    int d_head;               // of the sums
    int d_head_v;             // of the tensors
};

inline constexpr int kPrepareThreads = 256;

template <DType kDType, int kLanes>  // of a row
__global__ void __launch_bounds__(kPrepareThreads) prepare_backward_kernel(const __grid_constant__ PrepareArgs args) {
    wait_for_prerequisites();
    const int group = blockIdx.x % args.n_groups;
    const int batch_head = blockIdx.x / args.n_groups;
    const int sequence = batch_head / args.n_heads, head = batch_head % args.n_heads;
    const bool packed = args.cu_seqlens_q != nullptr;
    const SequenceRows rows = sequence_rows(args.cu_seqlens_q, args.seqused_q, args.seq_len_q,
                                            nameable_rows(args.total_q), sequence);
    const int first = group * kSumRows;
    if (first >= rows.n_rows) return;

    const int64_t sum_row = first_sum_row(packed, rows, args.n_heads, head, args.seq_len_q, args.total_q,
                                          args.n_sequences, sequence) + first;
    if (args.dQ_sums != nullptr) {
        float4 *sums = reinterpret_cast<float4 *>(args.dQ_sums + sum_row * args.d_head);
        for (int i = threadIdx.x; i < kSumRows * args.d_head / 4; i += kPrepareThreads) {
            sums[i] = make_float4(0, 0, 0, 0);
        }
    }
    if (args.turns != nullptr) {
        int *turns = args.turns + sum_row / kSumRows * args.turns_per_group;
        for (int i = threadIdx.x; i < args.turns_per_group; i += kPrepareThreads) turns[i] = 0;
    }

    const int lane = threadIdx.x % kLanes;
    const bool has_chunk = lane * kChunkElements < args.d_head_v;
    const int64_t numbers = lse_begin(packed, rows, args.n_heads, head, args.seq_len_q, args.total_q);
    const auto row_of = [&](const void *tensor, const TensorStrides &strides, int row) {
        return static_cast<const char *>(tensor) +
               (rows.batch * strides.batch + head * strides.head + (rows.first_row + int64_t(row)) * strides.seq) *
                   kElementBytes +
               lane * kChunkBytes;
    };
#pragma unroll 4
    for (int i = threadIdx.x / kLanes; i < kSumRows; i += kPrepareThreads / kLanes) {
        const int row = first + i;
        const bool exists = row < rows.n_rows;
        float sum = 0;
        if (exists && has_chunk) {
            const Chunk o = load_global(row_of(args.O, args.O_strides, row));
            const Chunk dout = load_global(row_of(args.dO, args.dO_strides, row));
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 a = unpack<kDType>(o.reg[j]), b = unpack<kDType>(dout.reg[j]);
                sum += a.x * b.x + a.y * b.y;
            }
        }
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
        if (exists && lane == 0) {
            const float lse = args.lse[numbers + row];
            if (lse == -INFINITY) sum = 0;  // O is 0; nothing of dO counts, not even NaN
            if (args.dlse != nullptr) sum -= args.dlse[numbers + row];
            args.delta[numbers + row] = sum;
            if (args.lse_log2 != nullptr) {
                args.lse_log2[numbers + row] = lse == -INFINITY ? INFINITY : lse * kLog2e;
            }
        }
    }
}

// `d_head`: of the sums; `turns_per_group`: 0 where no order is kept.
template <DType kDType>
cudaError_t launch_prepare_backward(const BackwardProblem &problem, int d_head, int turns_per_group,
                                    cudaStream_t stream) {
    const int n_groups = ceil_div(problem.seq_len_q, kSumRows);
    const int64_t blocks = int64_t(problem.batch) * problem.n_heads * n_groups;
    if (blocks == 0) return cudaSuccess;
    if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
    PrepareArgs args{
        .O = problem.o,
        .dO = problem.dout,
        .lse = problem.lse,
        .dlse = problem.dlse,
        .delta = problem.delta,
        .lse_log2 = problem.lse_log2,
        .dQ_sums = problem.dq == nullptr ? nullptr : problem.dq_sums,
        .turns = turns_per_group == 0 ? nullptr : problem.counters,
        .turns_per_group = turns_per_group,
        .O_strides = problem.o_strides,
        .dO_strides = problem.dout_strides,
        .n_heads = problem.n_heads,
        .n_groups = n_groups,
        .n_sequences = problem.batch,
        .seq_len_q = problem.seq_len_q,
        .cu_seqlens_q = problem.cu_seqlens_q,
        .seqused_q = problem.seqused_q,
        .total_q = problem.total_q,
        .d_head = d_head,
        .d_head_v = problem.d_head_v,
    };
    void *parameters[] = {&args};
    const int chunks = problem.d_head_v / kChunkElements;
    const void *kernel = chunks <= 8    ? reinterpret_cast<const void *>(&prepare_backward_kernel<kDType, 8>)
                         : chunks <= 16 ? reinterpret_cast<const void *>(&prepare_backward_kernel<kDType, 16>)
                                        : reinterpret_cast<const void *>(&prepare_backward_kernel<kDType, 32>);
    return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kPrepareThreads), parameters, 0, stream);
}

}  // namespace flash
