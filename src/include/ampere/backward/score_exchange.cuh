// P^T and dS^T in shared memory: what the score warps hand to the gradient warps of the same keys, and what
// all that make dQ read.
//
// P^T of warps that own their keys alone goes from a lane to the same lane of the other warp: its order is
// that of the fragments, 16 bytes a lane. A pair's P^T lies as a tile of (B_c, B_r), as dS^T does always:
// there it is the A operand of dV, or of dK, too.
#pragma once

#include "ampere/backward/barriers.cuh"
#include "ampere/backward/products.cuh"

namespace flash::ampere {

template <typename Kernel>
struct ScoreExchange {
    using Tile = typename Kernel::ScoreTile;
    // A fragments of the warp's part: (warp_keys, warp_queries).
    using Fragments = HeldOperand<Kernel::m_tiles, Kernel::warp_query_tiles>;

    uint32_t smem_P, smem_dS;
    uint32_t lane_P;     // 16 bytes a lane
    uint32_t lane_row;   // the lane's first row of a tile of 16, 4 bytes at chunk 0
    uint32_t lane_down;  // of an A fragment
    int lane, first_query_tile;

    FLASH_DEVICE ScoreExchange(uint32_t smem, int group, int half, int lane) : lane(lane) {
        const uint32_t rows = Tile::tile_offset(group * Kernel::m_tiles, 0);
        smem_P = smem + Kernel::smem_P + rows;
        smem_dS = smem + Kernel::smem_dS + rows;
        lane_P = lane * kChunkBytes;
        lane_row = accumulator(lane, 0).row * Tile::row_bytes + accumulator(lane, 0).column * kElementBytes;
        const LdmatrixRow down = ldmatrix_row_QV(lane);
        lane_down = Tile::offset(down.row, down.chunk);
        first_query_tile = half * Kernel::warp_query_tiles;
    }

    // Fragment (k, m) of P as the operand of dV, and what the gradient warps take (hands_over_apart).
    FLASH_DEVICE void hand_over(const uint32_t (&P)[4], const uint32_t (&handed)[4], int k, int m) const {
        if constexpr (Kernel::paired_warps) {
            store_fragment(smem_P, P, k, m);
            if constexpr (Kernel::hands_over_apart) store_fragment(smem_P + Tile::bytes, handed, k, m);
        } else {
            // The warp's rows of the tile are as many bytes as its fragments; their order is another.
            store_shared(place_of(k, m), chunk(Kernel::hands_over_apart ? handed : P));
        }
    }

    // What was handed over for (k, m).
    FLASH_DEVICE void take(uint32_t (&handed)[4], int k, int m) const {
        if constexpr (Kernel::paired_warps) {
            const uint32_t tile = smem_P + (Kernel::hands_over_apart ? Tile::bytes : 0);
#pragma unroll
            for (int i = 0; i < 4; ++i) handed[i] = load_shared_word(tile + tile_place(k, m, i));
        } else {
            const Chunk taken = load_shared(place_of(k, m));
#pragma unroll
            for (int i = 0; i < 4; ++i) handed[i] = taken.reg[i];
        }
    }

    FLASH_DEVICE void store_dS(const Fragments &dS, int slot) const {
#pragma unroll
        for (int k = 0; k < Kernel::warp_query_tiles; ++k) {
#pragma unroll
            for (int m = 0; m < Kernel::m_tiles; ++m) {
                store_fragment(smem_dS + slot * Tile::bytes, dS.steps[k].rmem[m], k, m);
            }
        }
    }

    // A pair's A operands, of all queries.
    FLASH_DEVICE void load_P(RowFragment<Kernel::m_tiles> &fragment, int step) const {
        load(fragment, smem_P, step);
    }
    FLASH_DEVICE void load_dS(RowFragment<Kernel::m_tiles> &fragment, int step, int slot) const {
        load(fragment, smem_dS + slot * Tile::bytes, step);
    }

  private:
    static FLASH_DEVICE Chunk chunk(const uint32_t (&reg)[4]) { return {{reg[0], reg[1], reg[2], reg[3]}}; }

    FLASH_DEVICE uint32_t place_of(int k, int m) const {
        // A tile's panels lie one behind the other: a warp's share is its rows of each panel.
        constexpr int panel_fragments = 4;
        return smem_P + k / panel_fragments * Tile::panel_bytes +
               (k % panel_fragments * Kernel::m_tiles + m) * (kWarpSize * kChunkBytes) + lane_P;
    }

    // Register i of fragment (k, m): rows + 8 for odd i, columns + 8 from i = 2 on.
    FLASH_DEVICE uint32_t tile_place(int k, int m, int i) const {
        const int query_tile = first_query_tile + k;
        const int chunk = 2 * (query_tile % Tile::panel_tiles) + i / 2;
        const int position = Kernel::cfg.swizzled ? swizzled(lane / 4, chunk) : chunk;
        return lane_row + position * kChunkBytes + query_tile / Tile::panel_tiles * Tile::panel_bytes +
               (m * kMmaM + i % 2 * 8) * Tile::row_bytes;
    }

    FLASH_DEVICE void store_fragment(uint32_t smem, const uint32_t (&fragment)[4], int k, int m) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) store_shared(smem + tile_place(k, m, i), fragment[i]);
    }

    FLASH_DEVICE void load(RowFragment<Kernel::m_tiles> &fragment, uint32_t smem, int step) const {
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
            ldmatrix(fragment.rmem[m], Tile::fragment_offset(lane_down, m, step) + smem);
        }
    }
};

}  // namespace flash::ampere
