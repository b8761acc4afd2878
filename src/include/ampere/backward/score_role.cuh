// The score warps: S^T = K Q^T, P^T = 2^(S^T - LSE), dV += P^T dO, and what they hand to the gradient warps.
#pragma once

#include "ampere/backward/block_work.cuh"
#include "ampere/backward/query_gradient.cuh"
#include "ampere/backward/score_exchange.cuh"
#include "common/softcap.cuh"

namespace flash::ampere {

template <typename Kernel>
struct ScoreRole {
    static constexpr int n_tiles = Kernel::warp_queries / kMmaN;
    using Scores = Sums<Kernel::m_tiles, n_tiles>;
    using Fragments = typename ScoreExchange<Kernel>::Fragments;
    using dVSums = Sums<Kernel::m_tiles, Kernel::warp_d_v / kMmaN>;

    const BlockWork<Kernel> &work;
    uint32_t lane_down, lane_right;  // in a tile of 16 rows; the same in all tiles
    int first_key;                   // of the warp
    HeldOperand<Kernel::m_tiles, Kernel::holds_K ? Kernel::d_tiles : 1> held_K;

    FLASH_DEVICE explicit ScoreRole(const BlockWork<Kernel> &work) : work(work) {
        const LaneRows rows(work.lane);
        lane_down = Kernel::KTile::offset(rows.down.row, rows.down.chunk);
        lane_right = Kernel::KTile::offset(rows.right.row, rows.right.chunk);
        first_key = work.first_key + work.group * Kernel::warp_keys;
    }

    FLASH_DEVICE void load_K(RowFragment<Kernel::m_tiles> &fragment, int step) const {
        const uint32_t smem =
            work.smem + Kernel::smem_K + Kernel::KTile::tile_offset(work.group * Kernel::m_tiles, 0);
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
            ldmatrix(fragment.rmem[m], Kernel::KTile::fragment_offset(lane_down, m, step) + smem);
        }
    }

    FLASH_DEVICE void make_scores(Scores &S, int stage) {
        S.clear();
        const uint32_t smem_Q = work.smem + Kernel::smem_Q + stage * Kernel::QTile::bytes +
                                Kernel::QTile::tile_offset(work.half * Kernel::warp_query_tiles, 0);
        const auto load_Q = [&](uint32_t (&B)[4], int step, int n) {
            ldmatrix(B, Kernel::QTile::fragment_offset(lane_right, n, step) + smem_Q);
        };
        if constexpr (Kernel::holds_K) {
            multiply<Kernel::dtype, Kernel::d_tiles>(S, held_K, load_Q);
        } else {
            auto A = streamed<Kernel::m_tiles>([&](auto &fragment, int step) { load_K(fragment, step); });
            multiply<Kernel::dtype, Kernel::d_tiles>(S, A, load_Q);
        }
    }

    // The first query of the warp's column 0 of this lane.
    FLASH_DEVICE int lane_query(const QueryWalk &at) const {
        return at.tile * Kernel::B_r + work.half * Kernel::warp_queries + accumulator(work.lane, 0).column;
    }

    FLASH_DEVICE void hide(Scores &S, const QueryWalk &at) const {
        const int row = at.tile * Kernel::B_r + work.half * Kernel::warp_queries;
        if (work.mask.sees_all(row, row + Kernel::warp_queries - 1,
                               {first_key, first_key + Kernel::warp_keys})) {
            return;
        }
        const int query = lane_query(at);
        const int key = first_key + accumulator(work.lane, 0).row;
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
#pragma unroll
            for (int column = 0; column < 2; ++column) {
                const Range seen = work.mask.keys_of(query + n * kMmaN + column);
#pragma unroll
                for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float &score = S.rmem[m][n][2 * r + column];
                        if (!seen.has(key + m * kMmaM + 8 * r)) score = work.args.hidden_score;
                    }
                }
            }
        }
    }

    // P^T, times 2^shift and rounded; on its way it is handed over, with softcap times 1 - tanh^2.
    FLASH_DEVICE void make_probabilities(Fragments &P, Scores &S, const ScoreExchange<Kernel> &exchange,
                                         const QueryWalk &at, int stage) const {
        if constexpr (Kernel::has_mod) return make_modified_probabilities(P, S, exchange, at, stage);
        if constexpr (Kernel::traits.softcap) {
#pragma unroll
            for (auto &row : S.rmem) {
#pragma unroll
                for (auto &tile : row) {
#pragma unroll
                    for (float &score : tile) score = softcap_tanh(score * work.args.score_factor);
                }
            }
        }
        hide(S, at);
        const float factor = Kernel::traits.softcap ? work.args.exponent_factor : work.args.score_factor;
        const uint32_t lse =
            work.smem_lse(stage) + 4 * (work.half * Kernel::warp_queries + accumulator(work.lane, 0).column);
#pragma unroll
        for (int k = 0; k < Kernel::warp_query_tiles; ++k) {
            const float2 row_lse[2] = {load_shared_float2(lse + 4 * kMmaN * (2 * k)),
                                       load_shared_float2(lse + 4 * kMmaN * (2 * k + 1))};
#pragma unroll
            for (int m = 0; m < Kernel::m_tiles; ++m) {
                uint32_t handed[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {  // rows + 8 for odd i, columns + 8 from i = 2 on
                    const float *scores = &S.rmem[m][2 * k + i / 2][i % 2 * 2];
                    float low = exp2_approx(scores[0] * factor - row_lse[i / 2].x);
                    float high = exp2_approx(scores[1] * factor - row_lse[i / 2].y);
                    P.steps[k].rmem[m][i] = pack<Kernel::dtype>(low, high);
                    if constexpr (Kernel::traits.softcap) {
                        low *= slope(scores[0]), high *= slope(scores[1]);
                    }
                    if constexpr (Kernel::hands_over_apart) handed[i] = pack_finite(low, high);
                }
                exchange.hand_over(P.steps[k].rmem[m], handed, k, m);
            }
        }
    }

    // The same with functions of the user's, element by element. Queries that see nothing may be none.
    FLASH_DEVICE void make_modified_probabilities(Fragments &P, const Scores &S,
                                                  const ScoreExchange<Kernel> &exchange, const QueryWalk &at,
                                                  int stage) const {
        using Mod = HeadMod<typename Kernel::Mod>;
        const Mod mod(mod_of<typename Kernel::Mod>(work.args).captured, work.place.batch,
                      work.query_head(at));
        const int query = lane_query(at), key = first_key + accumulator(work.lane, 0).row;
        const uint32_t lse =
            work.smem_lse(stage) + 4 * (work.half * Kernel::warp_queries + accumulator(work.lane, 0).column);
        [[maybe_unused]] const auto kept = work.kept_weights(at);
        typename Mod::Column columns[Kernel::m_tiles][2];
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) columns[m][r] = mod.column(key + m * kMmaM + 8 * r);
        }
#pragma unroll
        for (int k = 0; k < Kernel::warp_query_tiles; ++k) {
            uint32_t handed[Kernel::m_tiles][4];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float2 lse_pair = load_shared_float2(lse + 4 * kMmaN * (2 * k + n));
                Probability p[Kernel::m_tiles][2][2];  // of keys, then of queries
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int row = query + (2 * k + n) * kMmaN + c;
                    const Range seen = work.seeing_rows.has(row) ? work.mask.keys_of(row) : Range{0, 0};
                    const auto of_row = mod.row(row);
#pragma unroll
                    for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            const int of_key = key + m * kMmaM + 8 * r;
                            const float given = S.rmem[m][2 * k + n][2 * r + c] * work.args.score_factor;
                            p[m][r][c] = mod.probability(of_row, columns[m][r], given, row, of_key,
                                                         c == 0 ? lse_pair.x : lse_pair.y);
                            if (!seen.has(of_key)) p[m][r][c] = {0.0f, 0.0f};
                        }
                    }
                }
#pragma unroll
                for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        if constexpr (Kernel::drops) {
                            const int block = m * Kernel::warp_query_tiles + k;
#pragma unroll
                            for (int c = 0; c < 2; ++c) {
                                float &value = p[m][r][c].value;
                                if (!kept.has(block, r, 2 * n + c)) value = -value;
                                if constexpr (Kernel::signs_dropped) p[m][r][c].handed_on = value;
                            }
                            P.steps[k].rmem[m][2 * n + r] =
                                pack_positive<Kernel::dtype>(p[m][r][0].value, p[m][r][1].value);
                        } else {
                            P.steps[k].rmem[m][2 * n + r] =
                                pack<Kernel::dtype>(p[m][r][0].value, p[m][r][1].value);
                        }
                        handed[m][2 * n + r] =
                            pack_handed<Kernel::handed>(p[m][r][0].handed_on, p[m][r][1].handed_on);
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < Kernel::m_tiles; ++m) {
                exchange.hand_over(P.steps[k].rmem[m], handed[m], k, m);
            }
        }
    }

    FLASH_DEVICE void add_to_dV(dVSums &dV, const ScoreExchange<Kernel> &exchange, Fragments &P,
                                int stage) const {
        const uint32_t smem_dO = work.smem + Kernel::smem_dO + stage * Kernel::dOTile::bytes +
                                 work.half * (Kernel::warp_d_v / kPanelColumns * Kernel::dOTile::panel_bytes);
        const auto load_dO = [&](uint32_t (&B)[4], int step, int n) {
            ldmatrix_transposed(B, Kernel::dOTile::fragment_offset(lane_down, step, n) + smem_dO);
        };
        if constexpr (Kernel::paired_warps) {
            auto A =
                streamed<Kernel::m_tiles>([&](auto &fragment, int step) { exchange.load_P(fragment, step); });
            multiply<Kernel::dtype, Kernel::query_tiles>(dV, A, load_dO);
        } else {
            multiply<Kernel::dtype, Kernel::query_tiles>(dV, P, load_dO);
        }
    }

  private:
    // Of the capped score by the score, of a score that is hidden too: there P is 0.
    static FLASH_DEVICE float slope(float tanh) { return fmaxf(1 - tanh * tanh, 0.0f); }
};

}  // namespace flash::ampere
