// What a thread does to its scores where the kernel has a mod: behind the product, before the mask.
//
// What the thread's two rows need is computed once a tile, what a column needs once for both, and nothing is
// held in registers from tile to tile.
#pragma once

#include "common/ahead_of_scores.cuh"
#include "common/fragments.cuh"
#include "common/kept_weights.cuh"
#include "common/mod.cuh"
#include "common/mod_tiles.cuh"
#include "common/mod_values.cuh"
#include "common/ptx.cuh"
#include "hopper/layout.cuh"
#include "hopper/mask_tile.cuh"

namespace flash::hopper {

template <typename Kernel>
struct ScoreMods {
    using Mod = typename Kernel::Mod;
    static constexpr int B_c = Kernel::B_c;
    // Loads for so many squares of 8 columns may be under way at a time: more take registers that are S's and
    // O's. Where a step has several forms, or O is wide, the branches that see to it would cost more:
    // ptxas finds no registers that all forms agree on, and lets no products run beside anything.
    static constexpr int kSquaresAhead = 4;

    // The same of a mask.
    static constexpr int kSquaresHidden = Kernel::n_consumers > 2 ? 2 : 4;

    static constexpr int kSquares = B_c / kMmaN;
    // Registers that a thread has for what it knows while products run. Where a step has several forms, the
    // branches of a row that does not lie well would keep products from running beside anything.
    static constexpr bool kSeveralForms = Kernel::masks_diagonal || Kernel::warp_loads;
    static constexpr int kSpareRegisters = Kernel::n_consumers > 2 || kSeveralForms ? 0 : 36;
    static constexpr bool kBegun =
        Kernel::adds_steps || Kernel::begins_scores;  // they are what the function makes of them
    static constexpr bool kFoundEarly =
        !kBegun && knows_ahead<Mod> && AheadOfScores<Mod, kSquares>::kRegisters <= kSpareRegisters;
    static constexpr int kStreamedSquares = kFoundEarly ? kSquares : kSquares % 4 == 0 ? 4 : 2;
    // What copies do not bring, taller blocks have no registers for.
    static constexpr bool kOneByOne =
        streams_tiles<Mod> && !Kernel::copies_streamed && Kernel::n_consumers > 2;
    using Known = std::conditional_t<kBegun, NothingAhead, AheadOfScores<Mod, kSquares, kStreamedSquares>>;
    static constexpr bool kDivided = Mod::kLoadsElements && !kFoundEarly && !Kernel::masks_diagonal &&
                                     !Kernel::warp_loads && Kernel::d_head_v <= 128;

    const typename Mod::Captured &captured;  // arguments of the launch
    int batch;
    int head;
    int seq_len_q;

    // `row`: the first of the thread's two, 8 apart; `first_key` is the tile's; both within the sequence.
    // `known`: found, for the same tile; groups of so many squares of 8 columns, by `find_group(square)`.
    // kAhead: else nothing is known.
    template <bool kAhead, typename FindGroup>
    FLASH_DEVICE void apply(float (&rmem_S)[B_c / 2], Known &known, float scale, int row, int first_key,
                            int lane, TileKind kind, const FindGroup &find_group) const {
        const auto once = Mod::once(captured);
        const auto of_head = Mod::head(captured, once, batch, head);
        if constexpr (Mod::kChangesScores && !kBegun) {
            const typename Mod::Row rows[2] = {Mod::row(captured, once, of_head, batch, head, row),
                                               Mod::row(captured, once, of_head, batch, head, row + 8)};
            constexpr bool kIsDivided = kDivided || (knows_ahead<Mod> && !kAhead);
            for_each_column<kIsDivided>(
                once, of_head, first_key, lane, [&](const auto &column, int key, int i) {
                    if (kAhead && i % (4 * kStreamedSquares) == 0) find_group(i / 4);
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float &s = rmem_S[i + 2 * r];
                        if constexpr (kAhead && knows_ahead<Mod>) {
                            s = Mod::score_ahead(captured, once, of_head, rows[r], column,
                                                 known.at(r, i / 4, i % 2), s * scale, batch, head,
                                                 row + 8 * r, key);
                        } else {
                            s = Mod::score(captured, once, of_head, rows[r], column, s * scale, batch, head,
                                           row + 8 * r, key);
                        }
                    }
                });
        }
        if constexpr (Mod::kHidesKeys) {
            if (kind == TileKind::FULL) return;
            const typename Mod::Row rows[2] = {Mod::row(captured, once, of_head, batch, head, row),
                                               Mod::row(captured, once, of_head, batch, head, row + 8)};
            hide_unseen<B_c, kSquaresHidden>(
                rmem_S, lane, kind == TileKind::EMPTY,
                [&](int of_tile) {
                    return Mod::column(captured, once, of_head, batch, head, first_key + of_tile);
                },
                [&](const typename Mod::Column &column, int of_tile) {
                    const int key = first_key + of_tile;
                    const auto sees = [&](int r) {
                        return uint32_t{Mod::visible(captured, once, of_head, rows[r], column, 0.f, batch,
                                                     head, row + 8 * r, key)};
                    };
                    return sees(0) | sees(1) << 1;
                });
        }
    }

    // Which weights of the tile dropout keeps. A square: 8 columns.
    FLASH_DEVICE auto kept_weights(int row, int first_key, int lane) const {
        return KeptOfQueries<B_c / kMmaN>(HeadDropout(captured.dropout, batch, head), [&](int square) {
            return MatrixCoordinate{row, first_key + square * kMmaN + accumulator(lane, 0).column};
        });
    }

  private:
    // f(column, key, index of its element in the thread's first row)
    template <bool kIsDivided, typename Once, typename Head, typename F>
    FLASH_DEVICE void for_each_column(const Once &once, const Head &of_head, int first_key, int lane,
                                      const F &f) const {
#pragma unroll
        for (int n = 0; n < B_c / kMmaN; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int key = first_key + n * kMmaN + accumulator(lane, c).column;
                f(Mod::column(captured, once, of_head, batch, head, key), key, 4 * n + c);
            }
            if (kIsDivided && n % kSquaresAhead == kSquaresAhead - 1) {
                divide_schedule(seq_len_q, n);
            }
        }
    }
};

}  // namespace flash::hopper
