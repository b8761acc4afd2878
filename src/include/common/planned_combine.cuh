// The second kernel of planned work: the rows of sequences whose keys were cut, from the parts in the
// workspace. It goes over the same sequences in the same order as the first (planned_work.cuh), so that both
// know where a row's parts are without telling each other. A warp adds up a row; the order of its sums is
// that of the parts.
#pragma once

#include "common/chunk_combine.cuh"
#include "common/combined_rows.cuh"
#include "common/planned_output.cuh"
#include "common/split_combine.cuh"

namespace flash {

struct PlannedCombineArgs {
    PlannedLaunch planned;
    PlannedOutput out;
    int window_left, window_right;
    float unseen, largest;  // of chunks: as of ChunkCombineArgs
};

inline constexpr int kPlannedCombineWarps = 8;
inline constexpr int kPlannedCombineBlocksPerSm = 2;

// B_c: of the first kernel, whose tiles say how many parts there are. kChunkTiles: parts are chunks of so
// many.
template <DType kDType, ForwardTraits TRAITS, int B_c, int kChunkTiles = 0>
__global__ void __launch_bounds__(kPlannedCombineWarps *kWarpSize)
    planned_combine_kernel(const __grid_constant__ PlannedCombineArgs args) {
    __shared__ float smem_weights[kPlannedCombineWarps][kMaxSplits];
    static_assert(kMostParts <= kMaxSplits);
    constexpr int columns = 4;  // of a lane at a time: 16 bytes of a part
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    float *weights = smem_weights[warp];
    const PlannedLaunch &launch = args.planned;
    const PlannedOutput &out = args.out;
    wait_for_prerequisites();

    const auto sequence = [&](int b) {
        return planned_sequence<TRAITS, B_c, kChunkTiles>(launch, args.window_left, args.window_right, b);
    };
    PlannedGroups groups;
    groups.start();
    const int n_warps = static_cast<int>(gridDim.x) * kPlannedCombineWarps;
#pragma unroll 1
    for (int number = static_cast<int>(blockIdx.x) * kPlannedCombineWarps + warp;; number += n_warps) {
        const bool found = groups.advance_to(launch.batch, number, [&](int b) -> PlannedCount {
            const PlannedSequence s = sequence(b);
            const int64_t partial_rows = partial_rows_of(launch, s);
            return {partial_rows == 0 ? 0 : s.used * launch.group * launch.row_heads, partial_rows};
        });
        if (!found) return;
        const auto [b, in_sequence, partial] = groups.place(number);
        const PlannedSequence s = sequence(b);
        if (!partial_fits(launch, s, partial)) continue;  // it was not cut
        const int rows = s.used * launch.group;           // of a head of rows
        const int row_head = in_sequence / rows, row = in_sequence - row_head * rows;
        const int query = launch.by_group.divide(row);
        const int head = row_head * launch.group + (row - query * launch.group);

        const CombineArgs parts{
            .partial_o = launch.partial_o + partial * out.d_head_v,
            .partial_lse = launch.partial_lse + partial,
            .total_rows = int64_t(rows) * launch.row_heads,
            .n_splits = s.parts,
        };
        if constexpr (kChunkTiles > 0) {
            const float2 *pairs =
                reinterpret_cast<const float2 *>(launch.partial_lse) + partial + in_sequence;
            const int64_t place = int64_t(s.q.first_row) + query;
            const int64_t first = place * out.strides.seq + head * out.strides.head;
            for (int column = lane * columns; column < max_of(out.d_head_v, kWarpSize * columns);
                 column += kWarpSize * columns) {
                const bool in_row = column < out.d_head_v;
                JoinedChunks joined(args.unseen);
                joined.take(pairs, parts.partial_o + int64_t(in_sequence) * out.d_head_v + column, s.parts,
                            parts.total_rows, out.d_head_v, in_row);
                const RowEnd end =
                    joined.end(args.unseen, args.largest, TRAITS.sinks ? out.sinks + head : nullptr);
                if (column == 0 && out.lse != nullptr) out.lse[head * out.total_q + place] = end.lse;
                if (in_row)
                    store_columns<kDType>(out.O, out.element_bytes == 4, first + column,
                                          joined.scaled(end.factor));
            }
            continue;
        }
        __syncwarp();  // all lanes have read the weights of the row before
        const float sink = TRAITS.sinks ? out.sinks[head] : -INFINITY;
        const float lse = weigh_parts(parts, in_sequence, sink, weights);
        const int64_t place = int64_t(s.q.first_row) + query;
        if (lane == 0 && out.lse != nullptr) out.lse[head * out.total_q + place] = lse;
        const int64_t first = place * out.strides.seq + head * out.strides.head;
        for (int column = lane * columns; column < out.d_head_v; column += kWarpSize * columns) {
            const float *part = parts.partial_o + int64_t(in_sequence) * out.d_head_v + column;
            const float4 o = sum_of_parts<16>(part, parts.total_rows * out.d_head_v, parts.n_splits, weights);
            store_columns<kDType>(out.O, out.element_bytes == 4, first + column, o);
        }
    }
}

inline PlannedOutput planned_output(const ForwardProblem &problem, bool has_sinks) {
    return {problem.o,
            problem.o_strides,
            problem.lse,
            has_sinks ? problem.sinks : nullptr,
            problem.total_q,
            problem.d_head_v,
            problem.o_float32 ? 4 : kElementBytes};
}

// Launches the kernel behind the first one. kTarget: as of launch_split_combine.
template <DType kDType, ForwardTraits TRAITS, int B_c, int kTarget, int kChunkTiles = 0>
cudaError_t launch_planned_combine(const ForwardProblem &problem, const PlannedLaunch &planned, int n_sms,
                                   cudaStream_t stream, float unseen = 0.0f) {
    const bool cuts = planned.plan.fixed > 1 || (planned.plan.fixed == 0 && planned.plan.slots > 0);
    if (!cuts && !planned.all_parts) return cudaSuccess;
    PlannedCombineArgs args{
        planned, planned_output(problem, TRAITS.sinks), problem.window_left, problem.window_right,
        unseen,  largest_exponent(kDType, true)};
    void *parameters[] = {&args};
    const void *kernel =
        reinterpret_cast<const void *>(&planned_combine_kernel<kDType, TRAITS, B_c, kChunkTiles>);
    constexpr int kThreads = kPlannedCombineWarps * kWarpSize;
    cudaError_t error = cudaSuccess;
    if (problem.n_sms > 0) {  // not early: see launch_split_combine
        error = launch_kernel<false>(kernel, static_cast<unsigned>(n_sms), kThreads, 0, stream, parameters);
    } else {
        error =
            launch_kernel<kTarget >= 90>(kernel, static_cast<unsigned>(n_sms * kPlannedCombineBlocksPerSm),
                                         kThreads, 0, stream, parameters);
    }
    if (error != cudaSuccess) cudaGetLastError();  // reported here: the next launch starts afresh
    return error;
}

}  // namespace flash
