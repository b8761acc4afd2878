// The end of a work item: O divided by the row sums and rounded, the log-sum-exp, and both on their way to
// global memory.
#pragma once

#include <cmath>

#include "common/dropout.cuh"
#include "common/quad.cuh"
#include "common/row_end.cuh"
#include "hopper/forward/item_slot.cuh"
#include "hopper/layout.cuh"

namespace flash::hopper {

// What the softmax leaves behind, by value: with next_item the next item's softmax starts before this one is
// stored.
struct RowState {
    float sum[2];        // the thread's share
    float reference[2];  //
};

// Stages O (64, d_v) of one warpgroup in shared memory, in the layout of Q's slot.
template <typename Kernel>
FLASH_DEVICE void stage_output(const float (&rmem_O)[Kernel::d_head_v / 2], const float (&factor)[2],
                               uint32_t smem_O, int first_row, int lane) {
    const int row = lane & 15;
#pragma unroll
    for (int j = 0; j < Kernel::d_head_v / 16; ++j) {  // 16 columns: four 8x8 matrices of the warp's 16 rows
        const float *o = rmem_O + 8 * j;
        const uint32_t chunk = 2 * j + (lane >> 4);
        stmatrix_x4(smem_O + chunk_offset(Kernel::B_r, first_row + row, chunk),
                    pack<Kernel::dtype>(o[0] * factor[0], o[1] * factor[0]),
                    pack<Kernel::dtype>(o[2] * factor[1], o[3] * factor[1]),
                    pack<Kernel::dtype>(o[4] * factor[0], o[5] * factor[0]),
                    pack<Kernel::dtype>(o[6] * factor[1], o[7] * factor[1]));
    }
}

// Stores O (64, d_v) of one warpgroup from registers, 16 bytes a lane: each lane owns two neighbouring
// columns of every eight, and after the transpose eight neighbouring ones of 32. Rows past the end, and
// columns past the tensor's, are left out.
template <typename Kernel>
FLASH_DEVICE void store_output(const float (&rmem_O)[Kernel::d_head_v / 2], const float (&factor)[2],
                               const ForwardKernelArgs &args, const WorkItem &item, int first_row, int lane) {
    const int quad_lane = lane & 3;
    const SequenceRows rows = query_rows<Kernel::traits>(args, item);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = first_row + 8 * r;
        uint16_t *gmem_O = static_cast<uint16_t *>(args.o) + rows.batch * args.o_strides.batch +
                           (static_cast<int64_t>(rows.first_row) + row) * args.o_strides.seq +
                           item.head * args.o_strides.head + quad_lane * 8;
#pragma unroll
        for (int group = 0; group < Kernel::d_head_v / 32; ++group) {
            uint32_t v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int element = 4 * (4 * group + i) + 2 * r;
                v[i] = pack<Kernel::dtype>(rmem_O[element] * factor[r], rmem_O[element + 1] * factor[r]);
            }
            transpose_quad(v, quad_lane);
            const bool in_head = !Kernel::traits.padded_head || group * 32 + quad_lane * 8 < args.d_head_v;
            if (row < rows.n_rows && in_head) store_global_streaming(gmem_O + group * 32, v);
        }
    }
}

// The same for a part of the keys: O (64, d_v) stays float32, and four lanes write 32 bytes of a row at once.
template <typename Kernel>
FLASH_DEVICE void store_partial_output(const float (&rmem_O)[Kernel::d_head_v / 2], const float (&factor)[2],
                                       const ForwardKernelArgs &args, const WorkItem &item, int first_row,
                                       int lane) {
    const int n_columns = Kernel::traits.padded_head ? args.d_head_v : Kernel::d_head_v;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = first_row + 8 * r;
        float *gmem_O = args.partial_o + (partial_row(args, item) + row) * n_columns + (lane & 3) * 2;
        if (row >= query_rows<Kernel::traits>(args, item).n_rows) continue;
#pragma unroll
        for (int chunk = 0; chunk < Kernel::d_head_v / kChunkElements; ++chunk) {
            if (Kernel::traits.padded_head && chunk * kChunkElements >= n_columns) continue;
            const float *o = rmem_O + 4 * chunk + 2 * r;
            *reinterpret_cast<float2 *>(gmem_O + chunk * kChunkElements) =
                make_float2(o[0] * factor[r], o[1] * factor[r]);
        }
    }
}

// The exponent of a row's reference. By row it is not joined with what is added to it, as kernels that
// combine chunks cannot.
template <typename Kernel>
FLASH_DEVICE float exponent_of(float reference, float exponent_factor) {
    return Kernel::by_row ? __fmul_rn(reference, exponent_factor) : reference * exponent_factor;
}

// What a chunk of keys has left of the rows of a warpgroup, for the kernel that joins chunks.
template <typename Kernel>
FLASH_DEVICE void store_chunk(const float (&rmem_O)[Kernel::d_head_v / 2], const RowState &state,
                              const ForwardKernelArgs &args, const WorkItem &item, int row0, int lane) {
    constexpr float kWhole[2] = {1.f, 1.f};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = quad_sum(state.sum[r]);
        const int row = row0 + 8 * r;
        if ((lane & 3) == 0 && row < query_rows<Kernel::traits>(args, item).n_rows) {
            reinterpret_cast<float2 *>(args.partial_lse)[partial_row(args, item) + row] =
                make_float2(exponent_of<Kernel>(state.reference[r], args.exponent_factor), sum);
        }
    }
    store_partial_output<Kernel>(rmem_O, kWhole, args, item, row0, lane);
}

// Normalises O and sends it and the LSE out.
template <typename Kernel>
FLASH_DEVICE void finish_item(const float (&rmem_O)[Kernel::d_head_v / 2], const RowState &state,
                              const ForwardKernelArgs &args, const SharedMemory<Kernel> &smem,
                              const WorkItem &item, uint32_t q_slot, int warpgroup, int warp, int lane) {
    constexpr float kLargest = largest_exponent(Kernel::dtype, true);
    const int row_of_warp = warpgroup * kWarpgroupRows + warp * 16;
    const int row0 = item.q_block * Kernel::B_r + row_of_warp + accumulator(lane, 0).row;
    if constexpr (Kernel::traits.split && Kernel::chunk_tiles > 0) {
        return store_chunk<Kernel>(rmem_O, state, args, item, row0, lane);
    }
    const SequenceRows rows = query_rows<Kernel::traits>(args, item);
    float *const lse = Kernel::traits.split ? args.partial_lse : args.lse;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float exponent = exponent_of<Kernel>(state.reference[r], args.exponent_factor);
        const float sum =
            sum_or_nan(quad_sum(state.sum[r]), exponent, state.reference[r] == args.lowest, kLargest);
        // The combination of parts adds the sink.
        const RowEnd end = Kernel::traits.sinks && !Kernel::traits.split
                               ? end_row(exponent, sum, args.sinks[item.head])
                               : end_row(exponent, sum);
        factor[r] = end.factor * weight_scale<typename Kernel::Mod>(args);
        const int row = row0 + 8 * r;
        if (lse != nullptr && (lane & 3) == 0 && row < rows.n_rows) {
            const int64_t first = Kernel::traits.split ? partial_row(args, item)
                                                       : lse_index<Kernel::traits>(args, rows, item.head);
            lse[first + row] = end.lse;
        }
    }
    if constexpr (Kernel::traits.split) {
        store_partial_output<Kernel>(rmem_O, factor, args, item, row0, lane);
    } else if constexpr (Kernel::direct_store) {
        store_output<Kernel>(rmem_O, factor, args, item, row0, lane);
    } else {
        stage_output<Kernel>(rmem_O, factor, smem.q(q_slot), row_of_warp, lane);
        fence_async_proxy();  // the store thread's bulk copies must see what was staged
        __syncwarp();         // ... by every lane
        if (arrives_for_warp(lane)) mbarrier_arrive(smem.o_staged(q_slot));
    }
}

// The same of a planned item.
template <typename Kernel>
FLASH_DEVICE void finish_item(const float (&rmem_O)[Kernel::d_head_v / 2], const RowState &state,
                              const ForwardKernelArgs &args, const SharedMemory<Kernel> &,
                              const PlannedItem &item, uint32_t, int warpgroup, int warp, int lane) {
    constexpr float kLargest = largest_exponent(Kernel::dtype, true);
    const int row0 = warpgroup * kWarpgroupRows + warp * 16 + accumulator(lane, 0).row;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float exponent = exponent_of<Kernel>(state.reference[r], args.exponent_factor);
        // Of a chunk of keys it is looked at when all are joined.
        const bool in_range =
            state.reference[r] == args.lowest || (Kernel::chunk_tiles > 0 && item.partial_row >= 0);
        const float sum = sum_or_nan(quad_sum(state.sum[r]), exponent, in_range, kLargest);
        store_planned_row<Kernel::dtype, Kernel::d_head_v, Kernel::traits.padded_head, Kernel::traits.sinks,
                          (Kernel::chunk_tiles > 0)>(
            args.planned, args.output, item, row0 + 8 * r, exponent, sum,
            [&](int chunk) { return make_float2(rmem_O[4 * chunk + 2 * r], rmem_O[4 * chunk + 2 * r + 1]); });
    }
}

// ---------------------------------------------------------------- rows that see no key
template <typename Kernel>
FLASH_DEVICE int chunks_of_row(const ForwardKernelArgs &args) {
    return (Kernel::traits.padded_head ? args.d_head_v : Kernel::d_head_v) / kChunkElements;
}

// O = 0 in one 16-byte chunk of a row; with the first chunk LSE = -inf, or the sink.
template <typename Kernel>
FLASH_DEVICE void fill_chunk(const ForwardKernelArgs &args, const SequenceRows &rows, int64_t head,
                             int64_t row, int chunk) {
    const uint32_t zeros[4] = {0, 0, 0, 0};
    store_global_streaming(static_cast<uint16_t *>(args.o) + rows.batch * args.o_strides.batch +
                               (rows.first_row + row) * args.o_strides.seq + head * args.o_strides.head +
                               chunk * kChunkElements,
                           zeros);
    if (chunk == 0 && args.lse != nullptr)
        args.lse[lse_index<Kernel::traits>(args, rows, head) + row] =
            Kernel::traits.sinks ? args.sinks[head] : -INFINITY;
}

// The query blocks before first_q_block see no key (causal, seq_len_q > seq_len_k, or no keys at all). They
// are no work items; the threads of the producer's last two warps, which have nothing else to do, share them
// over the whole grid.
template <typename Kernel>
FLASH_DEVICE void fill_rows_without_keys(const ForwardKernelArgs &args, int thread, int n_threads) {
    const int n_chunks = chunks_of_row<Kernel>(args);
    const int64_t n_rows = min(args.work.first_q_block * Kernel::item_rows, args.work.seq_len_q);
    const int64_t end = n_rows * args.work.total_heads * n_chunks;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * n_threads + thread; i < end;
         i += static_cast<int64_t>(gridDim.x) * n_threads) {
        const int64_t row = i / n_chunks % n_rows, pair = i / n_chunks / n_rows;
        const SequenceRows rows{static_cast<int>(pair / args.work.n_heads), 0, args.work.seq_len_q};
        fill_chunk<Kernel>(args, rows, pair % args.work.n_heads, row, static_cast<int>(i % n_chunks));
    }
}

// An item without tiles, by the load warp. Of a part of the keys O is not read where LSE is -inf.
template <typename Kernel>
FLASH_DEVICE void fill_item_without_keys(const ForwardKernelArgs &args, const WorkItem &item) {
    const int lane = threadIdx.x % 32;
    const SequenceRows rows = query_rows<Kernel::traits>(args, item);
    const int first_row = item.q_block * Kernel::B_r;
    const int n_rows = min(Kernel::B_r, rows.n_rows - first_row);
    const int n_chunks = Kernel::traits.split ? 1 : chunks_of_row<Kernel>(args);
    for (int i = lane; i < n_rows * n_chunks; i += 32) {
        const int row = first_row + i / n_chunks;
        if constexpr (Kernel::traits.split && Kernel::chunk_tiles > 0) {
            reinterpret_cast<float2 *>(args.partial_lse)[partial_row(args, item) + row] =
                make_float2(0.f, 0.f);
        } else if constexpr (Kernel::traits.split) {
            args.partial_lse[partial_row(args, item) + row] = -INFINITY;
        } else {
            fill_chunk<Kernel>(args, rows, item.head, row, i % n_chunks);
        }
    }
}

}  // namespace flash::hopper
