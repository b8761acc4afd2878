// The second kernel of planned work: the rows of sequences whose keys were cut, from the parts in the
// workspace. It goes over the same sequences in the same order as the first (planned_work.cuh), so that both
// know where a row's parts are without telling each other. A warp adds up a row; the order of its sums is
// that of the parts.
//
// What it reads of the lengths it may read before the first kernel has ended: that one's blocks, all of which
// have called launch_dependents(), have waited for the kernels that wrote them. It reads past the L1 cache,
// which has no part in that.
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

inline constexpr int kPlannedCombineWarps = 8, kPlannedPartsAhead = 16;
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
    launch_dependents();

    PlannedGroups groups;
    groups.start();
    PlannedSequence own{};  // of this lane
    const auto find = [&](int number) {
        return groups.advance_to(launch.batch, number, [&](int b) -> PlannedCount {
            own = planned_sequence<TRAITS, B_c, kChunkTiles, true>(launch, args.window_left,
                                                                   args.window_right, b);
            const int64_t partial_rows = partial_rows_of(launch, own);
            return {partial_rows == 0 ? 0 : own.used * launch.group * launch.row_heads, partial_rows};
        });
    };
    // Few rows are those of many blocks, each on an SM of its own.
    const int n_blocks = static_cast<int>(gridDim.x), n_warps = n_blocks * kPlannedCombineWarps;
#pragma unroll 1
    for (int number = static_cast<int>(blockIdx.x) + warp * n_blocks; find(number); number += n_warps) {
        const auto [owner, in_sequence, partial] = groups.place(number);
        const PlannedSequence s = own.of_lane(owner);
        if (!partial_fits(launch, s, partial)) continue;  // it was not cut
        const int rows = s.used * launch.group;           // of a head of rows
        const int row_head = in_sequence / rows, row = in_sequence - row_head * rows;
        const int query = launch.by_group.divide(row);
        const int head = row_head * launch.group + (row - query * launch.group);

        wait_for_prerequisites();  // the parts are there
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
        // The first parts are on their way while their weights are worked out.
        const float *row_parts = parts.partial_o + int64_t(in_sequence) * out.d_head_v;
        const int64_t part_size = parts.total_rows * out.d_head_v;
        PartsAhead<kPlannedPartsAhead> ahead;
        int column = lane * columns;
        if (column < out.d_head_v) ahead.load(row_parts + column, part_size, 0, s.parts);
        const float sink = TRAITS.sinks ? out.sinks[head] : -INFINITY;
        const float lse = weigh_parts(parts, in_sequence, sink, weights);
        const int64_t place = int64_t(s.q.first_row) + query;
        if (lane == 0 && out.lse != nullptr) out.lse[head * out.total_q + place] = lse;
        const int64_t first = place * out.strides.seq + head * out.strides.head;
        // Batch after batch of the parts of four columns; the next four are kWarpSize lanes further.
        float4 o{};
#pragma unroll 1
        for (int begin = 0; column < out.d_head_v;) {
            ahead.add_to(o, weights, begin, s.parts);
            begin += kPlannedPartsAhead;
            if (begin >= s.parts) {
                store_columns<kDType>(out.O, out.element_bytes == 4, first + column, o);
                o = float4{};
                begin = 0;
                column += kWarpSize * columns;
                if (column >= out.d_head_v) break;
            }
            ahead.load(row_parts + column, part_size, begin, s.parts);
        }
    }
    wait_for_prerequisites();  // no thread ends before
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
