// The second kernel of keys whose chunks several thread blocks have taken (common/chunks.cuh): it joins those
// of a row, from the last to the first, as one thread block would have. A warp takes a row.
//
// Of a part there are, in the workspace, O not divided by l, and the pair (exponent, l). One with l = 0 shows
// the row no key: its O is not read.
#pragma once

#include "common/chunks.cuh"
#include "common/row_end.cuh"
#include "common/split_combine.cuh"

namespace flash {

struct ChunkCombineArgs : SplitCombineArgs {
    float unseen;   // the exponent of a row that has seen no key
    float largest;  // largest_exponent
};

inline constexpr int kChunkCombineWarps = 4;
inline constexpr int kChunksAhead = 8;  // of a row, read before those before them are joined

// The chunks of one row, joined: its exponent, l, and the lane's four columns of O.
struct JoinedChunks {
    float exponent, sum = 0.f;
    float4 o{};

    FLASH_DEVICE explicit JoinedChunks(float unseen) : exponent(unseen) {}

    // The end of the row. `sink`: of its head, or nullptr; `unseen`, `largest`: of ChunkCombineArgs.
    FLASH_DEVICE RowEnd end(float unseen, float largest, const float *sink) const {
        const float l = sum_or_nan(sum, exponent, exponent == unseen, largest);
        return sink != nullptr ? end_row(exponent, l, *sink) : end_row(exponent, l);
    }

    FLASH_DEVICE float4 scaled(float factor) const {
        return make_float4(o.x * factor, o.y * factor, o.z * factor, o.w * factor);
    }

    // `pairs`: of the row's first part; `o_parts`: likewise; `stride`: rows from part to part.
    FLASH_DEVICE void take(const float2 *pairs, const float *o_parts, int n_parts, int64_t stride,
                           int d_head_v, bool in_row) {
#pragma unroll 1
        for (int end = n_parts; end > 0; end -= kChunksAhead) {
            float2 pair[kChunksAhead];
            float4 part[kChunksAhead];
#pragma unroll
            for (int i = 0; i < kChunksAhead; ++i) {
                const int at = end - 1 - i;
                pair[i] = at >= 0 ? pairs[at * stride] : make_float2(0.f, 0.f);
                if (at >= 0 && in_row) {
                    part[i] = *reinterpret_cast<const float4 *>(o_parts + at * stride * d_head_v);
                }
            }
#pragma unroll
            for (int i = 0; i < kChunksAhead; ++i) {
                if (pair[i].y == 0.f) continue;
                const ChunkWeights weights(exponent, pair[i].x);
                exponent = weights.exponent;
                sum = weights.join(sum, pair[i].y);
                if (in_row) {
                    o.x = weights.join(o.x, part[i].x);
                    o.y = weights.join(o.y, part[i].y);
                    o.z = weights.join(o.z, part[i].z);
                    o.w = weights.join(o.w, part[i].w);
                }
            }
        }
    }
};

template <DType kDType, bool kVarlen>
__global__ void __launch_bounds__(kChunkCombineWarps *kWarpSize)
    chunk_combine_kernel(const __grid_constant__ ChunkCombineArgs args) {
    constexpr int columns = 4;  // of a lane at a time: 16 bytes of a part
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    wait_for_prerequisites();
    if constexpr (kVarlen) {
        const auto clear = [&]<typename Element>(Element) {
            const int n_chunks = args.d_head_v * static_cast<int>(sizeof(Element)) / kChunkBytes;
            clear_rows_of_none<Element>(args, args.O, args.O_strides, args.batch, args.n_heads, n_chunks,
                                        threadIdx.x, kChunkCombineWarps * kWarpSize);
        };
        if (args.O_float32) {
            clear(float{});
        } else {
            clear(uint16_t{});
        }
    }
    const int *cu_seqlens_q = kVarlen ? args.cu_seqlens_q : nullptr;
#pragma unroll 1
    for (int64_t row_index = int64_t{blockIdx.x} * kChunkCombineWarps + warp; row_index < args.total_rows;
         row_index += int64_t{gridDim.x} * kChunkCombineWarps) {
        const unsigned index = static_cast<unsigned>(row_index);
        const int row = static_cast<int>(index % args.seq_len_q);
        const int head = static_cast<int>(index / args.seq_len_q % args.n_heads);
        const int batch = static_cast<int>(index / args.seq_len_q / args.n_heads);
        const SequenceRows rows = sequence_rows(cu_seqlens_q, nullptr, args.seq_len_q, args.rows_q, batch);
        if (row >= rows.n_rows) continue;
        const int64_t first = rows.batch * args.O_strides.batch + head * args.O_strides.head +
                              (int64_t(rows.first_row) + row) * args.O_strides.seq;
        const float2 *pairs = reinterpret_cast<const float2 *>(args.partial_lse) + row_index;
        for (int column = lane * columns; column < max_of(args.d_head_v, kWarpSize * columns);
             column += kWarpSize * columns) {
            const bool in_row = column < args.d_head_v;
            JoinedChunks joined(args.unseen);
            joined.take(pairs, args.partial_o + row_index * args.d_head_v + column, args.n_splits,
                        args.total_rows, args.d_head_v, in_row);
            const RowEnd end =
                joined.end(args.unseen, args.largest, args.sinks != nullptr ? args.sinks + head : nullptr);
            if (column == 0 && args.lse != nullptr) {
                args.lse[lse_begin(cu_seqlens_q != nullptr, rows, args.n_heads, head, args.seq_len_q,
                                   args.total_q) +
                         row] = end.lse;
            }
            if (!in_row) continue;
            const float4 o = joined.scaled(end.factor);
            if (args.O_float32) {
                *reinterpret_cast<float4 *>(static_cast<float *>(args.O) + first + column) = o;
            } else {
                char *gmem = static_cast<char *>(args.O) + (first + column) * kElementBytes;
                *reinterpret_cast<uint2 *>(gmem) = make_uint2(pack<kDType>(o.x, o.y), pack<kDType>(o.z, o.w));
            }
        }
    }
}

// Launches the kernel behind the one that fills problem.partial_o and problem.partial_lse, which was launched
// into the same stream just before. kTarget: what both are compiled for, 90 for sm_90.
template <DType kDType, ForwardTraits TRAITS, int kTarget>
int launch_chunk_combine(const ForwardProblem &problem, float unseen, cudaStream_t stream) {
    const int64_t total_rows = int64_t(problem.batch) * problem.n_heads * problem.seq_len_q;
    if (total_rows > kMaxBlocks) return cudaErrorInvalidConfiguration;
    ChunkCombineArgs args{};
    args.partial_o = problem.partial_o;
    args.partial_lse = problem.partial_lse;
    args.O = problem.o;
    args.lse = problem.lse;
    args.sinks = TRAITS.sinks ? problem.sinks : nullptr;
    args.cu_seqlens_q = problem.cu_seqlens_q;
    args.O_strides = problem.o_strides;
    args.total_rows = total_rows;
    args.total_q = problem.total_q;
    args.n_splits = problem.n_splits;
    args.n_heads = problem.n_heads;
    args.seq_len_q = problem.seq_len_q;
    args.d_head_v = problem.d_head_v;
    args.batch = problem.batch;
    args.rows_q = nameable_rows(problem.total_q);
    args.O_float32 = problem.o_float32;
    args.unseen = unseen;
    args.largest = largest_exponent(kDType, true);
    void *parameters[] = {&args};
    const void *kernel = reinterpret_cast<const void *>(&chunk_combine_kernel<kDType, TRAITS.varlen>);
    const int blocks = ceil_div(static_cast<int>(total_rows), kChunkCombineWarps);
    constexpr int kThreads = kChunkCombineWarps * kWarpSize;
    cudaError_t error = cudaSuccess;
    if (problem.n_sms > 0) {  // not early: see launch_split_combine
        error = launch_kernel<false>(kernel, static_cast<unsigned>(min_of(blocks, problem.n_sms)), kThreads,
                                     0, stream, parameters);
    } else {
        error = launch_kernel<kTarget >= 90>(kernel, static_cast<unsigned>(blocks), kThreads, 0, stream,
                                             parameters);
    }
    if (error != cudaSuccess) cudaGetLastError();  // reported here: the next launch starts afresh
    return error;
}

}  // namespace flash
