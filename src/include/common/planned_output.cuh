// The end of a planned item's rows: to the output, or as a part of the keys to the workspace.
//
// A row is written by the four lanes of a quad, which share it in an accumulator of eight columns a chunk
// (fragments.cuh): lane q has columns 2 q and 2 q + 1 of each chunk.
#pragma once

#include <cmath>

#include "common/cuda_utils.cuh"
#include "common/fragments.cuh"
#include "common/planned_work.cuh"
#include "common/ptx.cuh"
#include "common/quad.cuh"
#include "common/row_end.cuh"
#include "common/rows_of_none.cuh"

namespace flash {

// Where the results of a launch go.
struct PlannedOutput {
    void *O;  // (total_q, n_heads, d_head_v)
    TensorStrides strides;
    float *lse;          // (n_heads, total_q), or nullptr
    const float *sinks;  // (n_heads), or nullptr
    int64_t total_q;
    int d_head_v;
    int element_bytes;  // of O
};

// Row `row` of an item's block, in the tensors.
struct PlannedRow {
    int query;  // of the sequence
    int head;   // query head
    bool exists, counts;

    FLASH_DEVICE PlannedRow(const PlannedLaunch &launch, const PlannedItem &item, int row) {
        const int in_block = launch.by_group.divide(row);
        query = item.q_block * launch.block_queries + in_block;
        head = item.head * launch.group + (row - in_block * launch.group);
        exists = in_block < launch.block_queries && query < item.all_queries;
        counts = exists && query < item.seq_len_q;
    }

    FLASH_DEVICE int64_t o_index(const PlannedOutput &out, const PlannedItem &item) const {
        return (int64_t(item.q_row) + query) * out.strides.seq + head * out.strides.head;
    }
    FLASH_DEVICE int64_t lse_index(const PlannedOutput &out, const PlannedItem &item) const {
        return head * out.total_q + item.q_row + query;
    }
    FLASH_DEVICE int64_t partial_index(const PlannedLaunch &launch, const PlannedItem &item) const {
        return item.partial_row + int64_t(query) * launch.group + head % launch.group;
    }
};

// O = 0 and LSE = -inf, by lanes 0 … n_lanes - 1.
FLASH_DEVICE void clear_planned_row(const PlannedOutput &out, const PlannedItem &item, const PlannedRow &row,
                                    int lane, int n_lanes) {
    char *gmem = static_cast<char *>(out.O) + row.o_index(out, item) * out.element_bytes;
    for (int byte = lane * kChunkBytes; byte < out.d_head_v * out.element_bytes;
         byte += n_lanes * kChunkBytes) {
        *reinterpret_cast<uint4 *>(gmem + byte) = make_uint4(0, 0, 0, 0);
    }
    if (lane == 0 && out.lse != nullptr) out.lse[row.lse_index(out, item)] = -INFINITY;
}

// kColumns: of the kernel; kPadded: the tensor may have fewer. `exponent`, `sum`: of row_end.cuh;
// `columns(chunk)`: the lane's two of a chunk. kChunks: a part of the keys leaves what chunks.cuh says.
template <DType kDType, int kColumns, bool kPadded, bool kSinks, bool kChunks = false, typename Columns>
FLASH_DEVICE void store_planned_row(const PlannedLaunch &launch, const PlannedOutput &out,
                                    const PlannedItem &item, int row_in_block, float exponent, float sum,
                                    const Columns &columns) {
    const int quad_lane = threadIdx.x & 3;
    const PlannedRow row(launch, item, row_in_block);
    if (item.partial_row >= 0) {
        if (!row.counts) {  // padding is cleared once, with the first part
            if (row.exists && item.part == 0) clear_planned_row(out, item, row, quad_lane, 4);
            return;
        }
        const RowEnd end = kChunks ? RowEnd{1.0f, 0.0f} : end_row(exponent, sum);
        const int64_t index = row.partial_index(launch, item);
        float *gmem = launch.partial_o + index * out.d_head_v + quad_lane * 2;
#pragma unroll
        for (int chunk = 0; chunk < kColumns / kChunkElements; ++chunk) {
            if (kPadded && chunk * kChunkElements >= out.d_head_v) continue;
            const float2 o = columns(chunk);
            *reinterpret_cast<float2 *>(gmem + chunk * kChunkElements) =
                make_float2(o.x * end.factor, o.y * end.factor);
        }
        if (quad_lane == 0) {
            if constexpr (kChunks) {
                reinterpret_cast<float2 *>(launch.partial_lse)[index] = make_float2(exponent, sum);
            } else {
                launch.partial_lse[index] = end.lse;
            }
        }
        return;
    }
    RowEnd end{0.0f, -INFINITY};
    if (row.counts) end = kSinks ? end_row(exponent, sum, out.sinks[row.head]) : end_row(exponent, sum);
    uint16_t *gmem = static_cast<uint16_t *>(out.O) + row.o_index(out, item) + quad_lane * kChunkElements;
#pragma unroll
    for (int group = 0; group < kColumns / (4 * kChunkElements); ++group) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 o = columns(4 * group + i);
            v[i] = row.counts ? pack<kDType>(o.x * end.factor, o.y * end.factor) : 0;
        }
        transpose_quad(v, quad_lane);
        const bool in_head = !kPadded || (4 * group + quad_lane) * kChunkElements < out.d_head_v;
        if (row.exists && in_head) {
            *reinterpret_cast<uint4 *>(gmem + group * 4 * kChunkElements) =
                make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
    if (row.exists && quad_lane == 0 && out.lse != nullptr) out.lse[row.lse_index(out, item)] = end.lse;
}

// An item without tiles, by `n_threads` threads: rows that see no key, and padding. Of a part of the keys O
// is not read where its LSE is -inf, or the sum of a chunk is 0.
template <bool kChunks = false>
FLASH_DEVICE void fill_planned_item(const PlannedLaunch &launch, const PlannedOutput &out,
                                    const PlannedItem &item, int thread, int n_threads) {
    if (item.partial_row < 0 && item.part > 0) return;  // of a sequence that is not cut after all
    const int n_rows = launch.block_queries * launch.group;
    constexpr int kLanes = 8;
#pragma unroll 1
    for (int i = thread / kLanes; i < n_rows; i += n_threads / kLanes) {
        const PlannedRow row(launch, item, i);
        if (!row.exists) break;
        const int lane = thread % kLanes;
        if (row.counts && item.partial_row >= 0) {
            const int64_t index = row.partial_index(launch, item);
            if constexpr (kChunks) {
                if (lane == 0)
                    reinterpret_cast<float2 *>(launch.partial_lse)[index] = make_float2(0.0f, 0.0f);
            } else {
                if (lane == 0) launch.partial_lse[index] = -INFINITY;
            }
        } else if (item.part == 0) {
            clear_planned_row(out, item, row, lane, kLanes);
            if (row.counts && lane == 0 && out.lse != nullptr && out.sinks != nullptr) {
                out.lse[row.lse_index(out, item)] = out.sinks[row.head];
            }
        }
    }
}

// Rows of no sequence (rows_of_none.cuh), whatever the type of the output is. `args`: the kernel's.
template <typename Args>
FLASH_DEVICE void clear_planned_rows_of_none(const Args &args, const PlannedOutput &out, int n_heads,
                                             int thread, int n_threads) {
    const int n_chunks = out.d_head_v * out.element_bytes / kChunkBytes;
    if (out.element_bytes == kElementBytes) {
        clear_rows_of_none(args, out.O, out.strides, args.planned.batch, n_heads, n_chunks, thread,
                           n_threads);
    } else {
        clear_rows_of_none<float>(args, out.O, out.strides, args.planned.batch, n_heads, n_chunks, thread,
                                  n_threads);
    }
}

}  // namespace flash
