// The second kernel of keys whose chunks several thread blocks have taken (common/chunks.cuh): it joins those
// of a row, from the last to the first, as one thread block would have. A warp takes a row.
//
// Of a part there are, in the workspace, O not divided by l, and the pair (exponent, l). One with l = 0 shows
// the row no key: its O is not read.
#pragma once

#include "common/chunks.cuh"
#include "common/combined_rows.cuh"
#include "common/row_end.cuh"

namespace flash {

struct ChunkCombineArgs : CombineArgs {
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
    const int lane = threadIdx.x % kWarpSize;
    each_combined_row<kVarlen, kChunkCombineWarps>(args, [&](const CombinedRow &row) {
        const float2 *pairs = reinterpret_cast<const float2 *>(args.partial_lse) + row.index;
        for (int column = lane * columns; column < max_of(args.d_head_v, kWarpSize * columns);
             column += kWarpSize * columns) {
            const bool in_row = column < args.d_head_v;
            JoinedChunks joined(args.unseen);
            joined.take(pairs, args.partial_o + row.index * args.d_head_v + column, args.n_splits,
                        args.total_rows, args.d_head_v, in_row);
            const float *sink = args.sinks != nullptr ? args.sinks + row.head : nullptr;
            const RowEnd end = joined.end(args.unseen, args.largest, sink);
            if (column == 0 && args.lse != nullptr) args.lse[row.lse] = end.lse;
            if (in_row)
                store_columns<kDType>(args.O, args.O_float32, row.first + column, joined.scaled(end.factor));
        }
    });
}

// Launches the kernel behind the one that fills problem.partial_o and problem.partial_lse, which was launched
// into the same stream just before. kTarget: what both are compiled for, 90 for sm_90.
template <DType kDType, ForwardTraits TRAITS, int kTarget>
int launch_chunk_combine(const ForwardProblem &problem, float unseen, cudaStream_t stream) {
    ChunkCombineArgs args{combine_args<TRAITS>(problem), unseen, largest_exponent(kDType, true)};
    if (args.total_rows > kMaxBlocks) return cudaErrorInvalidConfiguration;
    void *parameters[] = {&args};
    const cudaError_t error = launch_combined_rows<kTarget>(
        reinterpret_cast<const void *>(&chunk_combine_kernel<kDType, TRAITS.varlen>), problem,
        args.total_rows, kChunkCombineWarps, stream, parameters);
    if (error != cudaSuccess) cudaGetLastError();  // reported here: the next launch starts afresh
    return error;
}

}  // namespace flash
