// What functions of the user's do to the scores of a consumer's tile, and which weights dropout keeps.
#pragma once

#include "common/backward/ahead_of_columns.cuh"
#include "common/backward/element.cuh"
#include "common/kept_weights.cuh"
#include "hopper/backward/probabilities.cuh"

namespace flash::hopper {

// Consumer: what derives from it, with Probabilities' members, and what is known of the scores in hand.
template <typename Kernel, typename Consumer>
struct ModifiedTile {
    static constexpr int B_r = Kernel::B_r, B_c = Kernel::B_c;
    static constexpr int kPairs = B_r / 8;  // pairs of neighbouring queries, of one key row of a thread

    // Of the block whose scores are on their way: what functions of the user's let a warp know of them.
    FLASH_DEVICE void find_ahead() {
        Consumer &wg = self();
        if constexpr (Kernel::knows_ahead) {
            const auto &captured = mod_of<typename Kernel::Mod>(wg.args).captured;
            const int query = wg.q_block * B_r;
            wg.known.read(captured, wg.item.batch, wg.query_head, query,
                          wg.first_key_of_warpgroup() + wg.warp * 16, wg.lane);
            if constexpr (Kernel::shares_diagonals) {
                const HeadMod<typename Kernel::Mod> mod(captured, wg.item.batch, wg.query_head);
                const int between = wg.first_key_of_warpgroup() - query;
                meet_warpgroup();  // those of the block before have been read
                Kernel::Diagonals::find(wg.smem.diagonals(wg.warpgroup), wg.warp * kWarpSize + wg.lane,
                                        [&](int distance) { return mod.diagonal(between + distance); });
            }
            const int rows = B_r / 4;  // of a warp, so that a warpgroup fetches all
            Consumer::Known::prefetch(captured, wg.item.batch, wg.query_head, query + B_r,
                                      wg.first_key_of_warpgroup(), wg.warp * rows, rows, wg.lane);
        }
    }

    // The warps of a warpgroup wait for each other.
    FLASH_DEVICE void meet_warpgroup() const {
        const Consumer &wg = self();
        named_barrier_sync(named_barrier::kWarpgroup + wg.warpgroup, Kernel::warpgroup_threads);
    }

    // S as functions of the user's leave it, where that is all that they change. No product is in flight:
    // branches would cost registers that only wait for it.
    FLASH_DEVICE void modify_scores() {
        if constexpr (Kernel::hides_scores) hide_scores();
        if constexpr (Kernel::replaces_scores) replace_scores();
    }

    // S as functions make it, scaled; -inf where they hide it.
    FLASH_DEVICE void replace_scores() {
        Consumer &wg = self();
        using Mod = HeadMod<typename Kernel::Mod>;
        const Mod mod(mod_of<typename Kernel::Mod>(wg.args).captured, wg.item.batch, wg.query_head);
        const int key = wg.first_key();
        const typename Mod::Column keys[2] = {mod.column(key), mod.column(key + 8)};
        wg.known.arrange();
        if constexpr (Kernel::shares_diagonals) meet_warpgroup();
        float diagonal[2][2] = {};  // of the second row and of the first
        if constexpr (Kernel::knows_ahead) find_diagonals(mod, -1, diagonal[0]);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            if constexpr (Kernel::knows_ahead) find_diagonals(mod, j, diagonal[1]);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int query = wg.q_block * B_r + 8 * j + 2 * (wg.lane & 3) + c;
                const typename Mod::Row row = mod.row(query);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float &score = wg.rmem_S[4 * j + 2 * r + c];
                    const float given = score * wg.args.score_factor;
                    if constexpr (Kernel::knows_ahead) {
                        score = mod.score_ahead(row, keys[r], wg.known.at(r, j, c, diagonal[1 - r][c]), given,
                                                query, key + 8 * r);
                    } else {
                        score = mod.score(row, keys[r], given, query, key + 8 * r);
                    }
                }
            }
#pragma unroll
            for (int c = 0; c < 2; ++c) diagonal[0][c] = diagonal[1][c];
        }
        if (Consumer::kMasksScores && wg.needs_mask()) wg.mask_elements(-INFINITY);
    }

    // What a mod knows of the distances of the thread's first row in square j; its second row, 8 keys
    // further, has those of the square before.
    FLASH_DEVICE void find_diagonals(const HeadMod<typename Kernel::Mod> &mod, int j,
                                     float (&diagonal)[2]) const {
        const Consumer &wg = self();
        if constexpr (has_diagonal<typename Kernel::Mod>) {
            const int own = wg.warp * 16 + wg.lane / 4 - 2 * (wg.lane & 3);
            if constexpr (Kernel::shares_diagonals) {
                const uint32_t address =
                    wg.smem.diagonals(wg.warpgroup) + Kernel::Diagonals::place(own - 8 * j);
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    diagonal[c] = __uint_as_float(load_shared_word(address - c * 4));
                }
            } else {
                const int distance = wg.first_key_of_warpgroup() - wg.q_block * B_r + own - 8 * j;
#pragma unroll
                for (int c = 0; c < 2; ++c) diagonal[c] = mod.diagonal(distance - c);
            }
        }
    }

    // S = +-inf where a mask that is all of the user's functions hides it.
    FLASH_DEVICE void hide_scores() {
        Consumer &wg = self();
        if constexpr (Kernel::hides_scores) {
            if (wg.kind == TileKind::FULL) return;
            using Mod = HeadMod<typename Kernel::Mod>;
            const Mod mod(mod_of<typename Kernel::Mod>(wg.args).captured, wg.item.batch, wg.query_head);
            const int key = wg.first_key();
            const typename Mod::Column keys[2] = {mod.column(key), mod.column(key + 8)};
            hide_unseen<B_r, 4>(
                wg.rmem_S, wg.lane, wg.kind == TileKind::EMPTY,
                [&](int column) { return mod.row(wg.q_block * B_r + column); },
                [&](const typename Mod::Row &row, int column) {
                    const int query = wg.q_block * B_r + column;
                    return uint32_t{mod.visible(row, keys[0], query, key)} |
                           uint32_t{mod.visible(row, keys[1], query, key + 8)} << 1;
                },
                wg.args.hidden_score());
        }
    }

    // Finds which weights of the block in hand dropout keeps.
    FLASH_DEVICE void draw() {
        Consumer &wg = self();
        if constexpr (Kernel::drops) {
            const Dropout &dropout = mod_of<typename Kernel::Mod>(wg.args).captured.dropout;
            const int query = wg.q_block * B_r + accumulator(computed_here(wg.lane), 0).column;
            wg.stays = typename Consumer::KeptWeights(
                HeadDropout(dropout, wg.item.batch, wg.query_head),
                [&](int block) { return MatrixCoordinate{wg.first_key(), query + block * 16}; });
        }
    }

    // S -> P element by element: dS is made of P times the derivative, or weights are dropped. What is
    // written where is as Probabilities::probabilities has it.
    FLASH_DEVICE void modified_probabilities(uint32_t (&rmem_P)[B_r / 4], uint32_t (&rmem_half)[B_r / 4]) {
        Consumer &wg = self();
        using Mod = HeadMod<typename Kernel::Mod>;
        const Mod mod(mod_of<typename Kernel::Mod>(wg.args).captured, wg.item.batch, wg.query_head);
        const uint32_t address =
            wg.smem.lse(Consumer::slot(wg.blocks, Consumer::kQStages)) + (wg.lane & 3) * 8;
        const typename Mod::Column keys[2] = {mod.column(wg.first_key()), mod.column(wg.first_key() + 8)};
        const Range seeing[2] = {wg.visible_columns(0), wg.visible_columns(1)};
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const float2 lse = Consumer::kLseAhead ? wg.rmem_lse[j] : load_shared_float2(address + j * 32);
            float p[4], handed_on[4];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int column = 8 * j + 2 * (wg.lane & 3) + c, query = wg.q_block * B_r + column;
                const typename Mod::Row row = mod.row(query);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float score = wg.rmem_S[4 * j + 2 * r + c];
                    const float row_lse = c == 0 ? lse.x : lse.y;
                    Probability P;
                    if constexpr (Kernel::replaces_scores) {
                        P.value = P.handed_on = exp2_approx(fmaf(score, kLog2e, -row_lse));
                    } else {
                        P = mod.probability(row, keys[r], score * wg.args.score_factor, query,
                                            wg.first_key() + 8 * r, row_lse);
                    }
                    if (!seeing[r].has(column)) P = {0.f, 0.f};
                    p[2 * r + c] = P.value;
                    handed_on[2 * r + c] = P.handed_on;
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if constexpr (Kernel::signs_dropped) {
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        float &value = p[2 * r + c];
                        if (!wg.stays.has(j / 2, r, j % 2 * 2 + c)) value = -value;
                        handed_on[2 * r + c] = value;
                    }
                    rmem_P[2 * j + r] = pack_positive<Kernel::dtype>(p[2 * r], p[2 * r + 1]);
                } else {
                    rmem_P[2 * j + r] = pack<Kernel::dtype>(p[2 * r], p[2 * r + 1]);
                }
                if constexpr (Kernel::half_p) {
                    rmem_half[2 * j + r] = pack<Kernel::handed>(handed_on[2 * r], handed_on[2 * r + 1]);
                } else {
                    wg.rmem_S[4 * j + 2 * r] = handed_on[2 * r];
                    wg.rmem_S[4 * j + 2 * r + 1] = handed_on[2 * r + 1];
                }
            }
        }
        if constexpr (Kernel::drops && !Kernel::signs_dropped) drop_rounded(rmem_P);
    }

    // Where no sign tells what is dropped: the bits are found when the scores are gone, and live until dS.
    FLASH_DEVICE void drop_rounded(uint32_t (&rmem_P)[B_r / 4]) {
        Consumer &wg = self();
        draw();
#pragma unroll
        for (int i = 0; i < B_r / 4; ++i) {
            const int j = i / 2, r = i % 2;
            const uint32_t low = wg.stays.has(j / 2, r, j % 2 * 2) ? 0xffffu : 0u;
            const uint32_t high = wg.stays.has(j / 2, r, j % 2 * 2 + 1) ? 0xffff0000u : 0u;
            rmem_P[i] &= low | high;
        }
    }

  private:
    FLASH_DEVICE Consumer &self() { return static_cast<Consumer &>(*this); }
    FLASH_DEVICE const Consumer &self() const { return static_cast<const Consumer &>(*this); }
};

}  // namespace flash::hopper
