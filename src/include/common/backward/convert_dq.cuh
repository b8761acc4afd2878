// After the main kernel: dQ from its float32 sums (dq_sums.cuh), scaled, and rounded once but with kFloats.
// Every row of q is written: rows that a sequence owns but does not use, and rows of no sequence, get 0.
//
// One thread block works on kGroupRows rows of one head, each of its warps on 16.
#pragma once

#include "common/backward/dq_sums.cuh"
#include "common/backward/row_store.cuh"
#include "common/backward/rows_of_none.cuh"
#include "common/early_launch.cuh"

namespace flash {

struct ConvertArgs {
    const float *dQ_sums;
    RowTiles sum_tiles;
    void *dQ;
    TensorStrides dQ_strides;
    float factor;
    int n_heads, n_groups, n_sequences;
    int seq_len_q;
    const int *cu_seqlens_q, *seqused_q;
    int64_t total_q;
    int d_head;  // of the tensor
};

inline constexpr int kConvertThreads = kGroupRows / kMmaM * kWarpSize;

template <DType kDType, int kDHead, bool kFloats>
__global__ void __launch_bounds__(kConvertThreads)
    convert_dq_kernel(const __grid_constant__ ConvertArgs args) {
    constexpr int kBytes = kFloats ? sizeof(float) : kElementBytes;
    wait_for_prerequisites();
    clear_gradient_rows_of_none(args.cu_seqlens_q, args.n_sequences, args.total_q, args.dQ, args.dQ_strides,
                                args.n_heads, args.d_head);
    const int group = blockIdx.x % args.n_groups;
    const int batch_head = blockIdx.x / args.n_groups;
    const int sequence = batch_head / args.n_heads, head = batch_head % args.n_heads;
    const int total = nameable_rows(args.total_q);
    const SequenceRows owned = sequence_rows(args.cu_seqlens_q, nullptr, args.seq_len_q, total, sequence);
    const SequenceRows rows =
        sequence_rows(args.cu_seqlens_q, args.seqused_q, args.seq_len_q, total, sequence);
    const int lane = threadIdx.x % kWarpSize;
    const int first = group * kGroupRows + threadIdx.x / kWarpSize * kMmaM;
    if (first >= owned.n_rows) return;

    const int64_t tile = args.sum_tiles.first(rows, args.n_heads, head, sequence) + first / kMmaM;
    const float *sums = args.dQ_sums + tile * (kMmaM * args.d_head);
    char *gmem =
        static_cast<char *>(args.dQ) + (rows.batch * args.dQ_strides.batch + head * args.dQ_strides.head +
                                        (rows.first_row + int64_t(first + lane / 4)) * args.dQ_strides.seq) *
                                           kBytes;
#pragma unroll
    for (int n = 0; n < kDHead / kMmaN; n += 4) {
        float tiles[4][4] = {};
        if (first < rows.n_rows) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if ((n + i) * kMmaN < args.d_head) read_sums(tiles[i], sums + (n + i) * kSumTileFloats, lane);
            }
        }
        const int column = (n + lane % 4) * kMmaN;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first + lane / 4 + 8 * half;
            char *gmem_row = gmem + 8 * half * args.dQ_strides.seq * kBytes;
            if constexpr (kFloats) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int first_column = (n + i) * kMmaN;
                    if (row < owned.n_rows && first_column < args.d_head) {
                        store_float_row(gmem_row + first_column * kBytes, tiles[i], half, args.factor,
                                        row < rows.n_rows, lane);
                    }
                }
            } else {
                Chunk chunk = row_chunk<kDType>(tiles, 0, half, args.factor, lane);
                if (row >= rows.n_rows) chunk = Chunk{};
                if (row < owned.n_rows && column < args.d_head) {
                    store_global(gmem_row + column * kElementBytes, chunk);
                }
            }
        }
    }
}

// kEarly: see early_launch.cuh. kFloats: dQ is float32. `factor`: of the sums, beside the scale.
template <DType kDType, int kDHead, bool kEarly, bool kFloats>
cudaError_t launch_convert_dq(const BackwardProblem &problem, cudaStream_t stream, float factor = 1.0f) {
    const int n_groups = ceil_div(problem.seq_len_q, kGroupRows);
    const int64_t blocks = int64_t(problem.batch) * problem.n_heads * n_groups;
    if (blocks == 0 || problem.dq == nullptr) return cudaSuccess;
    if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
    ConvertArgs args{
        .dQ_sums = problem.dq_sums,
        .sum_tiles = row_tiles(problem),
        .dQ = problem.dq,
        .dQ_strides = problem.dq_strides,
        .factor = problem.softmax_scale * factor,
        .n_heads = problem.n_heads,
        .n_groups = n_groups,
        .n_sequences = problem.batch,
        .seq_len_q = problem.seq_len_q,
        .cu_seqlens_q = problem.cu_seqlens_q,
        .seqused_q = problem.seqused_q,
        .total_q = problem.total_q,
        .d_head = problem.d_head,
    };
    void *parameters[] = {&args};
    return launch_kernel<kEarly>(reinterpret_cast<const void *>(&convert_dq_kernel<kDType, kDHead, kFloats>),
                                 static_cast<unsigned>(blocks), kConvertThreads, 0, stream, parameters);
}

}  // namespace flash
