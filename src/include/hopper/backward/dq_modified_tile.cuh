// What functions of the user's do to the scores of a tile whose rows are queries, and which weights dropout
// keeps: of the kernel of dQ alone (dq_consumer.cuh).
#pragma once

#include "common/ahead_of_scores.cuh"
#include "common/backward/element.cuh"
#include "common/kept_weights.cuh"
#include "hopper/backward/kernel_args.cuh"
#include "hopper/mask_tile.cuh"

namespace flash::hopper {

// Consumer: what derives from it, with scores and the tile in hand.
template <typename Kernel, typename Consumer>
struct DqModifiedTile {
    static constexpr int B_c = Kernel::B_c;

    // Of the tile whose scores are computed.
    FLASH_DEVICE void read_kind() {
        Consumer &wg = self();
        if constexpr (Kernel::hides_scores) {
            // Through a shuffle: branches by it are the whole warp's.
            const uint32_t address = wg.smem.kind(Consumer::slot(wg.tiles, Kernel::k_stages), wg.warpgroup);
            wg.kind = static_cast<TileKind>(wg.uniform_word(load_shared_int(address)));
        }
    }

    // S = +-inf where a mask that is all of the user's functions hides it. No product is in flight: branches
    // would cost registers that only wait for it.
    FLASH_DEVICE void hide_scores() {
        Consumer &wg = self();
        if constexpr (Kernel::hides_scores) {
            if (wg.kind == TileKind::FULL) return;
            using Mod = HeadMod<typename Kernel::Mod>;
            const Mod mod(mod_of<typename Kernel::Mod>(wg.args).captured, wg.item.batch, wg.item.head);
            const typename Mod::Row rows[2] = {mod.row(wg.row(0)), mod.row(wg.row(1))};
            hide_unseen<B_c, 4>(
                wg.rmem_S, wg.lane, wg.kind == TileKind::EMPTY,
                [&](int of_tile) { return mod.column(wg.tile * B_c + of_tile); },
                [&](const typename Mod::Column &column, int of_tile) {
                    const int key = wg.tile * B_c + of_tile;
                    uint32_t seen = uint32_t{mod.visible(rows[0], column, wg.row(0), key)} |
                                    uint32_t{mod.visible(rows[1], column, wg.row(1), key)} << 1;
                    asm("" : "+r"(seen));  // ptxas has too few predicates for those of all keys (C7600)
                    return seen;
                },
                wg.args.hidden_score());
        }
    }

    // S as functions of the user's make it, scaled, where dS is made of P alone; -inf where they hide it.
    FLASH_DEVICE void replace_scores() {
        Consumer &wg = self();
        using OwnMod = typename Kernel::Mod;
        const auto &captured = mod_of<OwnMod>(wg.args).captured;
        const HeadMod<OwnMod> mod(captured, wg.item.batch, wg.item.head);
        const typename OwnMod::Row rows[2] = {mod.row(wg.row(0)), mod.row(wg.row(1))};
        const int first_key = wg.tile * B_c;
        constexpr int kSquares = B_c / kMmaN;
        constexpr int kStreamedSquares = kSquares % 4 == 0 ? 4 : 2;  // more take registers that are dQ's
        AheadOfScores<OwnMod, kSquares, kStreamedSquares> known;
        known.find(captured, wg.item.batch, wg.item.head, wg.row(0), first_key, wg.lane);
        known.prefetch(captured, wg.item.batch, wg.item.head, wg.row(0) - wg.lane / 4, first_key + B_c,
                       wg.lane);
#pragma unroll
        for (int j = 0; j < kSquares; ++j) {
            if (j % kStreamedSquares == 0) {
                known.find_group(captured, wg.item.batch, wg.item.head, wg.row(0), first_key + j * kMmaN,
                                 wg.lane);
            }
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int key = first_key + 8 * j + 2 * (wg.lane & 3) + c;
                const typename OwnMod::Column column = mod.column(key);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float &score = wg.rmem_S[4 * j + 2 * r + c];
                    const float given = score * wg.args.score_factor;
                    if constexpr (knows_ahead<OwnMod>) {
                        score = mod.score_ahead(rows[r], column, known.at(r, j, c), given, wg.row(r), key);
                    } else {
                        score = mod.score(rows[r], column, given, wg.row(r), key);
                    }
                }
            }
        }
    }

    // With functions of the user's: P times the derivative, element by element.
    FLASH_DEVICE void modified_probabilities() {
        Consumer &wg = self();
        using Mod = HeadMod<typename Kernel::Mod>;
        const Mod mod(mod_of<typename Kernel::Mod>(wg.args).captured, wg.item.batch, wg.item.head);
        const typename Mod::Row rows[2] = {mod.row(wg.row(0)), mod.row(wg.row(1))};
#pragma unroll
        for (int j = 0; j < B_c / 8; ++j) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int key = wg.tile * B_c + 8 * j + 2 * (wg.lane & 3) + c;
                const typename Mod::Column column = mod.column(key);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float &score = wg.rmem_S[4 * j + 2 * r + c];
                    score = mod.probability(rows[r], column, score * wg.args.score_factor, wg.row(r), key,
                                            wg.lse[r])
                                .handed_on;
                }
            }
        }
    }

    // dP, divided by 1 - p, of weights that dropout keeps, and 0 of the others.
    FLASH_DEVICE void drop(float (&rmem_dP)[B_c / 2]) const {
        const Consumer &wg = self();
        if constexpr (Kernel::drops) {
            const Dropout &dropout = mod_of<typename Kernel::Mod>(wg.args).captured.dropout;
            const int key = wg.tile * B_c + accumulator(computed_here(wg.lane), 0).column;
            const KeptOfQueries<B_c / 8> kept(
                HeadDropout(dropout, wg.item.batch, wg.item.head),
                [&](int square) { return MatrixCoordinate{wg.row(0), key + 8 * square}; });
#pragma unroll
            for (int i = 0; i < B_c / 2; ++i) {
                rmem_dP[i] = kept.has(i / 4, i % 4) ? rmem_dP[i] * dropout.scale : 0.f;
            }
        }
    }

  private:
    FLASH_DEVICE Consumer &self() { return static_cast<Consumer &>(*this); }
    FLASH_DEVICE const Consumer &self() const { return static_cast<const Consumer &>(*this); }
};

}  // namespace flash::hopper
