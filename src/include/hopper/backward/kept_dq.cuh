// Sums of dQ that a block keeps (kept_sums.cuh), as a consumer warpgroup sees them.
#pragma once

#include "hopper/backward/consumer.cuh"

namespace flash::hopper {

// Of the block in hand.
template <typename Kernel>
FLASH_DEVICE KeptPart part_of_block(const BackwardConsumer<Kernel> &wg) {
    const BackwardItem &item = wg.item;
    const TensorStrides &strides = wg.args.dq_strides;
    const PartOfSum part = part_of_sum<Kernel>(wg.args, item, wg.q_block);
    KeptPart kept{wg.dq_tile, part.last && !part.first, part.last, nullptr, 0};
    if (part.last && wg.args.dq != nullptr) {
        const int row = wg.q_block * Kernel::B_r +
                        (Kernel::dq_parts_are_rows ? wg.warpgroup * kWarpgroupRows : 0) + wg.warp * kMmaM +
                        wg.lane / 4;
        const int column = (Kernel::dq_parts_are_rows ? 0 : wg.warpgroup * Kernel::dq_columns) +
                           (wg.lane & 3) * kChunkElements;
        const int head = item.head * wg.args.group +
                         (wg.dq_tile - first_dq_tile<Kernel>(wg.args, item)) / wg.args.dq_tiles;
        const bool packed = Kernel::traits.varlen && wg.args.cu_seqlens_q != nullptr;
        kept.gmem = static_cast<uint16_t *>(wg.args.dq) + (packed ? 0 : item.batch) * strides.batch +
                    (int64_t{item.q_row} + row) * strides.seq + head * strides.head + column;
        kept.n_rows = item.seq_len_q - row;
    }
    return kept;
}

// The last part is added to the sum so far and rounded; others are staged for the reducing warp.
template <typename Kernel, int n>
FLASH_DEVICE void leave_dq(const BackwardConsumer<Kernel> &wg, float (&rmem_dQ)[n]) {
    constexpr int kBatch = 4;  // tiles of 8 columns whose sums are on their way: 16 registers
    wg.await_stage();          // all that was staged before is in the sums
    if (!wg.kept.last) {
        wg.stage_dq(rmem_dQ);
    } else if (wg.kept.gmem != nullptr) {
        const float4 *sums =
            reinterpret_cast<const float4 *>(kept_sums<Kernel>(wg.args, wg.kept.tile, wg.warpgroup)) +
            wg.warp * wg.kDqTiles * kWarpSize + wg.lane;
#pragma unroll
        for (int begin = 0; begin < wg.kDqTiles && wg.kept.continues; begin += kBatch) {
            float4 four[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) four[i] = __ldcg(sums + (begin + i) * kWarpSize);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                float *mine = rmem_dQ + 4 * (begin + i);
                mine[0] += four[i].x;
                mine[1] += four[i].y;
                mine[2] += four[i].z;
                mine[3] += four[i].w;
            }
        }
        const int columns =
            wg.args.d_head - (Kernel::dq_parts_are_rows ? 0 : wg.warpgroup * Kernel::dq_columns);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            store_gradient_row<Kernel, Kernel::dq_columns>(rmem_dQ, r, wg.args.softmax_scale * Kernel::p_unit,
                                                           wg.kept.gmem + 8 * r * wg.args.dq_strides.seq,
                                                           wg.lane & 3, 8 * r < wg.kept.n_rows, columns);
        }
    }
    wg.pass_stage();
}

}  // namespace flash::hopper
