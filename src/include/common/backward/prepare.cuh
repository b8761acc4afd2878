// Before the main kernel: of every row and head
//
//     delta    = rowsum(O * dO) - dLSE
//     lse_log2 = LSE * log2(e), less a shift that the main kernel wants; +inf for a row that sees no key,
//     whose P = 2^(S - LSE) is then 0
//
// and what the main kernel adds to begins as 0: the sums of dQ, or the turns of ordered sums, which stand in
// dQ until it is complete. Of these the main kernel leaves dQ itself, of tiles that some key is seen from;
// the rows of the others become 0 here.
//
// One thread block works on kGroupRows rows of one head; a row is read by as many lanes as it has chunks of
// 16 bytes, rounded up to a power of 2.
#pragma once

#include <cmath>

#include "backward.cuh"
#include "common/backward/dq_sums.cuh"
#include "common/backward/element.cuh"
#include "common/backward/gradient_words.cuh"
#include "common/backward/rows_of_none.cuh"
#include "common/backward/visible_rows.cuh"
#include "common/cuda_utils.cuh"
#include "common/ptx.cuh"
#include "common/sequence_rows.cuh"
#include "common/softmax_scale.cuh"

namespace flash {

// What a configuration wants of the pre-pass.
struct PrepareWork {
    bool clears_sums;
    bool clears_unvisited_rows;  // the main kernel leaves dQ of the tiles that it visits
    // Ordered sums: a tile's parts of dQ, each a counter in its first element, and their sizes. 0: no order
    // is kept, and another kernel leaves dQ.
    int part_rows, part_columns, parts_per_row;
    int rows_per_tile;
    int dq_words = 1;  // of 16 bits, of an element of dQ
    int lse_shift;     // P comes out times 2^lse_shift
};

struct PrepareArgs {
    const void *O, *dO;
    const float *lse, *dlse;
    float *delta, *lse_log2;  // lse_log2: nullptr where it is not wanted
    float *dQ_sums;           // nullptr: nothing to clear
    RowTiles sum_tiles;
    void *dQ;  // nullptr: others write all of it
    int part_rows, part_columns, parts_per_row;
    int rows_per_tile;  // a divisor of kGroupRows
    int dq_words;
    float lse_shift;
    TensorStrides O_strides, dO_strides;
    TensorStrides dQ_strides;  // in words of 16 bits
    int n_heads, n_groups;     // groups of kGroupRows rows of the longest sequence
    int n_sequences;
    int seq_len_q, seq_len_k;
    int window_left, window_right;  // also where a causal mask sets them
    const int *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;
    int64_t total_q, total_k;
    int d_head, d_head_v;
};

inline constexpr int kPrepareThreads = 256;

// Zeros for the rows of dQ, of one group, that the main kernel leaves out: rows of tiles in which no row sees
// a key, and rows that a sequence owns and does not use.
FLASH_DEVICE void clear_unvisited_rows(const PrepareArgs &args, const SequenceRows &rows, int sequence,
                                       int head, int first) {
    constexpr BackwardTraits any_mask{.window = true};
    const int owned =
        sequence_rows(args.cu_seqlens_q, nullptr, args.seq_len_q, nameable_rows(args.total_q), sequence)
            .n_rows;
    const int n_keys = sequence_rows(args.cu_seqlens_k, args.seqused_k, args.seq_len_k,
                                     nameable_rows(args.total_k), sequence)
                           .n_rows;
    const VisibleRows<any_mask> mask{rows.n_rows, n_keys, args.window_left, args.window_right};
    const Range seeing = mask.seeing_rows();
    const Range visited = seeing.begin < seeing.end
                              ? Range{seeing.begin / args.rows_per_tile * args.rows_per_tile,
                                      ceil_div(seeing.end, args.rows_per_tile) * args.rows_per_tile}
                              : Range{0, 0};
    const int chunks = args.d_head * args.dq_words / kChunkElements;
    char *gmem =
        static_cast<char *>(args.dQ) + (rows.batch * args.dQ_strides.batch + head * args.dQ_strides.head +
                                        rows.first_row * args.dQ_strides.seq) *
                                           kElementBytes;
    for (int i = threadIdx.x; i < kGroupRows * chunks; i += blockDim.x) {
        const int row = first + i / chunks;
        if (row < owned && (row >= rows.n_rows || !visited.has(row))) {
            store_global(gmem + row * args.dQ_strides.seq * kElementBytes + i % chunks * kChunkBytes,
                         Chunk{});
        }
    }
}

// The turns of ordered sums, of the rows of one group that the sequence uses.
FLASH_DEVICE void begin_turns(const PrepareArgs &args, const SequenceRows &rows, int head, int first) {
    const int row = first + static_cast<int>(threadIdx.x) / args.parts_per_row * args.part_rows;
    const int column = static_cast<int>(threadIdx.x) % args.parts_per_row * args.part_columns;
    if (row >= min_of(first + kGroupRows, rows.n_rows) || column >= args.d_head) return;
    char *gmem = static_cast<char *>(args.dQ) +
                 (rows.batch * args.dQ_strides.batch + head * args.dQ_strides.head +
                  (rows.first_row + int64_t(row)) * args.dQ_strides.seq + column * args.dq_words) *
                     kElementBytes;
    *reinterpret_cast<int *>(gmem) = 0;
}

template <DType kDType, int kLanes>  // of a row
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_backward_kernel(const __grid_constant__ PrepareArgs args) {
    const int group = blockIdx.x % args.n_groups;
    const int batch_head = blockIdx.x / args.n_groups;
    const int sequence = batch_head / args.n_heads, head = batch_head % args.n_heads;
    const bool packed = args.cu_seqlens_q != nullptr;
    const SequenceRows rows = sequence_rows(args.cu_seqlens_q, args.seqused_q, args.seq_len_q,
                                            nameable_rows(args.total_q), sequence);
    const int first = group * kGroupRows;
    if (args.dQ != nullptr) {
        clear_gradient_rows_of_none(args.cu_seqlens_q, args.n_sequences, args.total_q, args.dQ,
                                    args.dQ_strides, args.n_heads, args.d_head);
        clear_unvisited_rows(args, rows, sequence, head, first);
        if (args.parts_per_row > 0) begin_turns(args, rows, head, first);
    }
    if (first >= rows.n_rows) return;

    const int n_rows = min_of(kGroupRows, rows.n_rows - first);
    if (args.dQ_sums != nullptr) {
        const int64_t tile = args.sum_tiles.first(rows, args.n_heads, head, sequence) + first / kMmaM;
        const int tile_floats = kMmaM * args.d_head;
        float4 *sums = reinterpret_cast<float4 *>(args.dQ_sums + tile * tile_floats);
        for (int i = threadIdx.x; i < ceil_div(n_rows, kMmaM) * tile_floats / 4; i += kPrepareThreads) {
            sums[i] = make_float4(0, 0, 0, 0);
        }
    }

    const int lane = threadIdx.x % kLanes;
    const bool has_chunk = lane * kChunkElements < args.d_head_v;
    const int64_t numbers = lse_begin(packed, rows, args.n_heads, head, args.seq_len_q, args.total_q);
    const auto row_of = [&](const void *tensor, const TensorStrides &strides, int row) {
        return static_cast<const char *>(tensor) +
               (rows.batch * strides.batch + head * strides.head +
                (rows.first_row + int64_t(row)) * strides.seq) *
                   kElementBytes +
               lane * kChunkBytes;
    };
#pragma unroll 4
    for (int i = threadIdx.x / kLanes; i < kGroupRows; i += kPrepareThreads / kLanes) {
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
                args.lse_log2[numbers + row] = lse == -INFINITY ? INFINITY : lse * kLog2e - args.lse_shift;
            }
        }
    }
}

template <DType kDType, BackwardTraits TRAITS>
cudaError_t launch_prepare_backward(const BackwardProblem &problem, const PrepareWork &work,
                                    cudaStream_t stream) {
    const int n_groups = ceil_div(problem.seq_len_q, kGroupRows);
    const int64_t blocks = int64_t(problem.batch) * problem.n_heads * n_groups;
    if (blocks == 0) return cudaSuccess;
    if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
    constexpr int kUnboundedSide = (1 << 30) - 1;
    constexpr bool kSomeUnvisited = TRAITS.causal || TRAITS.window || TRAITS.varlen;
    const int right = TRAITS.window ? problem.window_right : kUnboundedSide;
    PrepareArgs args{
        .O = problem.o,
        .dO = problem.dout,
        .lse = problem.lse,
        .dlse = problem.dlse,
        .delta = problem.delta,
        .lse_log2 = problem.lse_log2,
        .dQ_sums = work.clears_sums && problem.dq != nullptr ? problem.dq_sums : nullptr,
        .sum_tiles = row_tiles(problem),
        .dQ = work.parts_per_row > 0 || (work.clears_unvisited_rows && kSomeUnvisited) ? problem.dq : nullptr,
        .part_rows = work.part_rows,
        .part_columns = work.part_columns,
        .parts_per_row = work.parts_per_row,
        .rows_per_tile = work.rows_per_tile,
        .dq_words = work.dq_words,
        .lse_shift = static_cast<float>(work.lse_shift),
        .O_strides = problem.o_strides,
        .dO_strides = problem.dout_strides,
        .dQ_strides = in_words(problem.dq_strides, work.dq_words),
        .n_heads = problem.n_heads,
        .n_groups = n_groups,
        .n_sequences = problem.batch,
        .seq_len_q = problem.seq_len_q,
        .seq_len_k = problem.seq_len_k,
        .window_left = TRAITS.window ? problem.window_left : kUnboundedSide,
        .window_right = TRAITS.causal ? min_of(right, 0) : right,
        .cu_seqlens_q = problem.cu_seqlens_q,
        .cu_seqlens_k = problem.cu_seqlens_k,
        .seqused_q = problem.seqused_q,
        .seqused_k = problem.seqused_k,
        .total_q = problem.total_q,
        .total_k = problem.total_k,
        .d_head = problem.d_head,
        .d_head_v = problem.d_head_v,
    };
    void *parameters[] = {&args};
    const int chunks = problem.d_head_v / kChunkElements;
    const void *kernel = chunks <= 8 ? reinterpret_cast<const void *>(&prepare_backward_kernel<kDType, 8>)
                         : chunks <= 16
                             ? reinterpret_cast<const void *>(&prepare_backward_kernel<kDType, 16>)
                             : reinterpret_cast<const void *>(&prepare_backward_kernel<kDType, 32>);
    return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kPrepareThreads), parameters, 0,
                            stream);
}

}  // namespace flash
