// The kernel after the main one: dQ = softmax_scale * dq_sums, rounded, from the order of dq_sums.cuh to that
// of the tensor; and zeros in rows of dq, dk and dv that no sequence owns.
#pragma once

#include "common/quad.cuh"
#include "common/rows_of_none.cuh"
#include "hopper/backward/dq_sums.cuh"
#include "hopper/backward/kernel_args.cuh"
#include "hopper/backward/static_kernel_configuration.cuh"
#include "hopper/ptx_sm90.cuh"

namespace flash::hopper {

struct FinishDqArgs {
    const float *dq_sums;
    void *dq, *dk, *dv;
    TensorStrides dq_strides, dk_strides, dv_strides;
    int seq_len_q, n_heads, n_heads_kv, batch;
    int dq_tiles;  // of a head
    float softmax_scale;
    const int *cu_seqlens_q, *cu_seqlens_k;
    int64_t total_q, total_k;
    int rows_q, rows_k;
    int d_head, d_head_v;  // of the tensors
};

// What clear_rows_of_none reads.
struct RowsOfNone {
    const int *cu_seqlens_q;
    int rows_q;
    int64_t total_q;
    float *lse = nullptr;
};

// Where the rows of a tile of dq_sums are. n_rows: of the sequence from the tile's first on; 0 or less: the
// tile is between two sequences.
struct DqTileRows {
    int batch, first_row, n_rows;
};

template <typename Kernel>
FLASH_DEVICE DqTileRows dq_tile_rows(const FinishDqArgs &args, int tile, int batch) {
    if (!Kernel::traits.varlen || args.cu_seqlens_q == nullptr) {
        return {batch, tile * Kernel::B_r, args.seq_len_q - tile * Kernel::B_r};
    }
    // The last sequence that begins at or before this tile.
    const auto first_tile = [&](int b) {
        return first_packed_dq_tile(row_offset(args.cu_seqlens_q[b], args.rows_q), Kernel::B_r, b);
    };
    int low = 0, high = args.batch - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_tile(middle) <= tile) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    const SequenceRows rows = sequence_rows(args.cu_seqlens_q, nullptr, args.seq_len_q, args.rows_q, low);
    const int row = (tile - first_tile(low)) * Kernel::B_r;
    return {0, rows.first_row + row, row < 0 ? 0 : rows.n_rows - row};
}

// One part of one tile a block, of 128 threads.
template <HopperBackwardKernelConfig CFG, BackwardTraits TRAITS>
__global__ void __launch_bounds__(128) hopper_finish_dq_kernel(const __grid_constant__ FinishDqArgs args) {
    using Kernel = StaticBackwardKernelConfig<CFG, TRAITS>;
    constexpr int kGroups = Kernel::dq_columns / 32;
    const int part = blockIdx.x % Kernel::n_consumers;
    const int number = blockIdx.x / Kernel::n_consumers;  // of the tile: head by head
    const int pair = number / args.dq_tiles, tile = number - pair * args.dq_tiles;
    const int batch = pair / args.n_heads, head = pair - batch * args.n_heads;
    const DqTileRows rows = dq_tile_rows<Kernel>(args, tile, batch);
    if (args.dq != nullptr && rows.n_rows > 0) {
        const float *sums =
            args.dq_sums + int64_t{number} * Kernel::dq_tile_floats + part * Kernel::dq_part_floats;
        float4 rmem[4 * kGroups];
#pragma unroll
        for (int c = 0; c < 4 * kGroups; ++c) {
            rmem[c] = *reinterpret_cast<const float4 *>(sums + (c * 128 + threadIdx.x) * 4);
        }
        const int lane = threadIdx.x % kWarpSize, quad_lane = lane & 3;
        const int row0 =
            (Kernel::dq_parts_are_rows ? part * kWarpgroupRows : 0) + threadIdx.x / kWarpSize * 16 + lane / 4;
        const int column0 = (Kernel::dq_parts_are_rows ? 0 : part * Kernel::dq_columns) + quad_lane * 8;
        const float scale = args.softmax_scale;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = row0 + 8 * r;
            uint16_t *gmem = static_cast<uint16_t *>(args.dq) + rows.batch * args.dq_strides.batch +
                             (int64_t{rows.first_row} + row) * args.dq_strides.seq +
                             head * args.dq_strides.head;
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float4 x = rmem[4 * group + i];
                    words[i] = r == 0 ? pack<Kernel::dtype>(x.x * scale, x.y * scale)
                                      : pack<Kernel::dtype>(x.z * scale, x.w * scale);
                }
                transpose_quad(words, quad_lane);
                const int column = column0 + group * 32;
                if (row < rows.n_rows && (!TRAITS.padded_head || column < args.d_head)) {
                    store_global_streaming(gmem + column, words);
                }
            }
        }
    }
    if constexpr (TRAITS.varlen) {
        const auto clear = [&](void *tensor, const TensorStrides &strides, const RowsOfNone &of, int n_heads,
                               int columns) {
            if (tensor == nullptr) return;
            clear_rows_of_none(of, tensor, strides, args.batch, n_heads, columns / kChunkElements,
                               threadIdx.x, 128);
        };
        const int d = TRAITS.padded_head ? args.d_head : Kernel::d_head;
        const int d_v = TRAITS.padded_head ? args.d_head_v : Kernel::d_head_v;
        const RowsOfNone queries{args.cu_seqlens_q, args.rows_q, args.total_q};
        const RowsOfNone keys{args.cu_seqlens_k, args.rows_k, args.total_k};
        clear(args.dq, args.dq_strides, queries, args.n_heads, d);
        clear(args.dk, args.dk_strides, keys, args.n_heads_kv, d);
        clear(args.dv, args.dv_strides, keys, args.n_heads_kv, d_v);
    }
}

}  // namespace flash::hopper
