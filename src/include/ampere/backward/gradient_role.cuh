// The gradient warps: dP^T = V dO^T, dS^T = P^T * (dP^T - delta), dK += dS^T Q.
#pragma once

#include "ampere/backward/block_work.cuh"
#include "ampere/backward/query_gradient.cuh"
#include "ampere/backward/score_exchange.cuh"
#include "common/backward/element.cuh"

namespace flash::ampere {

template <typename Kernel>
struct GradientRole {
    static constexpr int n_tiles = Kernel::warp_queries / kMmaN;
    using dPSums = Sums<Kernel::m_tiles, n_tiles>;
    using dKSums = Sums<Kernel::m_tiles, Kernel::warp_d / kMmaN>;
    using Fragments = typename ScoreExchange<Kernel>::Fragments;

    const BlockWork<Kernel> &work;
    uint32_t lane_down, lane_right;
    HeldOperand<Kernel::m_tiles, Kernel::holds_V ? Kernel::d_v_tiles : 1> held_V;

    FLASH_DEVICE explicit GradientRole(const BlockWork<Kernel> &work) : work(work) {
        const LaneRows rows(work.lane);
        lane_down = Kernel::VTile::offset(rows.down.row, rows.down.chunk);
        lane_right = Kernel::VTile::offset(rows.right.row, rows.right.chunk);
    }

    FLASH_DEVICE void load_V(RowFragment<Kernel::m_tiles> &fragment, int step) const {
        const uint32_t smem =
            work.smem + Kernel::smem_V + Kernel::VTile::tile_offset(work.group * Kernel::m_tiles, 0);
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
            ldmatrix(fragment.rmem[m], Kernel::VTile::fragment_offset(lane_down, m, step) + smem);
        }
    }

    FLASH_DEVICE void make_dP(dPSums &dP, int stage) {
        dP.clear();
        const uint32_t smem_dO = work.smem + Kernel::smem_dO + stage * Kernel::dOTile::bytes +
                                 Kernel::dOTile::tile_offset(work.half * Kernel::warp_query_tiles, 0);
        const auto load_dO = [&](uint32_t (&B)[4], int step, int n) {
            ldmatrix(B, Kernel::dOTile::fragment_offset(lane_right, n, step) + smem_dO);
        };
        if constexpr (Kernel::holds_V) {
            multiply<Kernel::dtype, Kernel::d_v_tiles>(dP, held_V, load_dO);
        } else {
            auto A = streamed<Kernel::m_tiles>([&](auto &fragment, int step) { load_V(fragment, step); });
            multiply<Kernel::dtype, Kernel::d_v_tiles>(dP, A, load_dO);
        }
    }

    // dP, divided by 1 - p, of weights that dropout keeps, and 0 of the others; unless P tells them.
    FLASH_DEVICE void drop(dPSums &dP, const QueryWalk &at) const {
        if constexpr (Kernel::drops && !Kernel::signs_dropped) {
            const auto kept = work.kept_weights(at);
            const float scale = weight_scale<typename Kernel::Mod>(work.args);
#pragma unroll
            for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
                for (int n = 0; n < n_tiles; ++n) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int block = m * Kernel::warp_query_tiles + n / 2;
                        float &value = dP.rmem[m][n][i];
                        value = kept.has(block, i / 2, n % 2 * 2 + i % 2) ? value * scale : 0.0f;
                    }
                }
            }
        }
    }

    FLASH_DEVICE void make_dS(Fragments &dS, const dPSums &dP, const ScoreExchange<Kernel> &exchange,
                              int stage) const {
        const uint32_t delta = work.smem_delta(stage) +
                               4 * (work.half * Kernel::warp_queries + accumulator(work.lane, 0).column);
#pragma unroll
        for (int k = 0; k < Kernel::warp_query_tiles; ++k) {
            const float2 row_delta[2] = {load_shared_float2(delta + 4 * kMmaN * (2 * k)),
                                         load_shared_float2(delta + 4 * kMmaN * (2 * k + 1))};
#pragma unroll
            for (int m = 0; m < Kernel::m_tiles; ++m) {
                uint32_t P[4];
                exchange.take(P, k, m);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float (&tile)[4] = dP.rmem[m][2 * k + i / 2];
                    float2 p = unpack<Kernel::handed>(P[i]), dp{tile[2 * (i % 2)], tile[2 * (i % 2) + 1]};
                    if constexpr (Kernel::signs_dropped) {
                        const float scale = weight_scale<typename Kernel::Mod>(work.args);
                        dp = {p.x > 0.0f ? dp.x * scale : 0.0f, p.y > 0.0f ? dp.y * scale : 0.0f};
                        p = {fabsf(p.x), fabsf(p.y)};
                    }
                    dS.steps[k].rmem[m][i] = pack<Kernel::dtype>(p.x * (dp.x - row_delta[i / 2].x),
                                                                 p.y * (dp.y - row_delta[i / 2].y));
                }
            }
        }
    }

    FLASH_DEVICE void add_to_dK(dKSums &dK, Fragments &dS, const ScoreExchange<Kernel> &exchange, int slot,
                                int stage) const {
        const uint32_t smem_Q = work.smem + Kernel::smem_Q + stage * Kernel::QTile::bytes +
                                work.half * (Kernel::warp_d / kPanelColumns * Kernel::QTile::panel_bytes);
        const auto load_Q = [&](uint32_t (&B)[4], int step, int n) {
            ldmatrix_transposed(B, Kernel::QTile::fragment_offset(lane_down, step, n) + smem_Q);
        };
        if constexpr (Kernel::paired_warps) {
            auto A = streamed<Kernel::m_tiles>(
                [&](auto &fragment, int step) { exchange.load_dS(fragment, step, slot); });
            multiply<Kernel::dtype, Kernel::query_tiles>(dK, A, load_Q);
        } else {
            multiply<Kernel::dtype, Kernel::query_tiles>(dK, dS, load_Q);
        }
    }
};

}  // namespace flash::ampere
