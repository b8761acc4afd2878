// From dS of a consumer's tile to the sums of dQ: dS as an operand of the product, and the warp's part of dQ
// on its way out, by itself or by the reducing warp.
#pragma once

#include "hopper/backward/kernel_args.cuh"
#include "hopper/backward/shared_memory.cuh"

namespace flash::hopper {

inline constexpr int kNoTile = -1;

// Consumer: what derives from it, with the block in hand.
template <typename Kernel, typename Consumer>
struct DqParts {
    static constexpr int B_r = Kernel::B_r, B_c = Kernel::B_c;
    static constexpr int kDqRegisters = Kernel::dq_part_floats / Kernel::warpgroup_threads;
    static constexpr int kDqTiles = kDqRegisters / 4;  // of 8 columns

    FLASH_DEVICE void store_score_gradients(const uint32_t (&rmem_dS)[B_r / 4]) const {
        const Consumer &wg = self();
        const uint32_t row = wg.warpgroup * kWarpgroupRows + wg.warp * 16 + (wg.lane & 15);
        const uint32_t address = wg.smem.ds(Consumer::slot(wg.blocks, 2)) + row * kPanelRowBytes +
                                 swizzled<uint32_t>(wg.lane & 7, wg.lane >> 4) * kChunkBytes;
#pragma unroll
        for (int k = 0; k < B_r / 16; ++k) {
            stmatrix_x4((address ^ (k % 4 * 2 * kChunkBytes)) + k / 4 * B_c * kPanelRowBytes, rmem_dS[4 * k],
                        rmem_dS[4 * k + 1], rmem_dS[4 * k + 2], rmem_dS[4 * k + 3]);
        }
    }

    // The tile of dq_sums with the warp's 16 rows of the block in hand; kNoTile: they are past the end.
    FLASH_DEVICE int dq_tile_of_warp() const {
        const Consumer &wg = self();
        const int row_tile = (Kernel::dq_parts_are_rows ? wg.warpgroup * 4 : 0) + wg.warp;
        return wg.q_block * B_r + row_tile * kMmaM < wg.item.seq_len_q ? wg.dq_tile + row_tile : kNoTile;
    }

    // For the reducing warp, when the part before has been read.
    FLASH_DEVICE void stage_dq(const float (&rmem_dQ)[kDqRegisters]) const {
        const Consumer &wg = self();
        const uint32_t address = wg.smem.dq(wg.warpgroup) + (wg.warp * kDqTiles * kWarpSize + wg.lane) * 16;
#pragma unroll
        for (int c = 0; c < kDqTiles; ++c) {
            store_shared(address + c * kWarpSize * 16,
                         make_int4(__float_as_int(rmem_dQ[4 * c]), __float_as_int(rmem_dQ[4 * c + 1]),
                                   __float_as_int(rmem_dQ[4 * c + 2]), __float_as_int(rmem_dQ[4 * c + 3])));
        }
        fence_async_proxy();  // the bulk reduction must see what was staged
    }
    FLASH_DEVICE void await_stage() const {
        const Consumer &wg = self();
        named_barrier_sync(named_barrier::kStageFree + wg.warpgroup, Kernel::warpgroup_threads + kWarpSize);
    }
    FLASH_DEVICE void pass_stage() const {
        const Consumer &wg = self();
        named_barrier_arrive(named_barrier::kStaged + wg.warpgroup, Kernel::warpgroup_threads + kWarpSize);
    }

    // A warp holds 16 rows and 48 or 64 columns, in tiles of 8, of which only the tensor's have sums.
    FLASH_DEVICE void send_dq(const float (&rmem_dQ)[kDqRegisters], int tile) const {
        const Consumer &wg = self();
        if constexpr (Kernel::stages_dq) {
            await_stage();
            stage_dq(rmem_dQ);
            pass_stage();
        } else {
            if (tile == kNoTile) return;
            const int column_tile = Kernel::dq_parts_are_rows ? 0 : wg.warpgroup * kDqTiles;
            const int columns = Kernel::traits.padded_head ? wg.args.d_head : Kernel::d_head;
            float *sums = wg.args.dq_sums + int64_t{tile} * (kMmaM * columns) + column_tile * kSumTileFloats +
                          wg.lane * 4;
#pragma unroll
            for (int c = 0; c < kDqTiles; ++c) {
                if (Kernel::traits.padded_head && (column_tile + c) * kMmaN >= columns) break;
                add_global_floats(sums + c * kSumTileFloats, rmem_dQ[4 * c], rmem_dQ[4 * c + 1],
                                  rmem_dQ[4 * c + 2], rmem_dQ[4 * c + 3]);
            }
        }
    }

  private:
    FLASH_DEVICE Consumer &self() { return static_cast<Consumer &>(*this); }
    FLASH_DEVICE const Consumer &self() const { return static_cast<const Consumer &>(*this); }
};

}  // namespace flash::hopper
