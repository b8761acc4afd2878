// What a warp does to its scores where the kernel has a mod: between scale and mask, element by element.
//
// A tile of 16 rows after the other: what the thread's two rows of it need is computed once a block of keys,
// what a column needs once for both, so that little is held in registers beside S, and nothing from block to
// block.
#pragma once

#include "ampere/gemm.cuh"
#include "common/ahead_of_scores.cuh"
#include "common/fragments.cuh"
#include "common/kept_weights.cuh"
#include "common/mod.cuh"
#include "common/mod_tiles.cuh"
#include "common/mod_values.cuh"
#include "common/ptx.cuh"

namespace flash::ampere {

template <typename Kernel, typename Mod = typename Kernel::Mod>
struct ScoreMods {
    static constexpr int kSquares = Kernel::warp_keys / kMmaN;  // of a tile of 16 rows
    static constexpr int kStreamedSquares = kSquares % 4 == 0   ? 4
                                            : kSquares % 2 == 0 ? 2
                                                                : 1;  // more take registers that are S's
    using Known = AheadOfScores<Mod, kSquares, kStreamedSquares>;

    const typename Mod::Captured &captured;  // arguments of the launch
    int batch;
    int head;

    // `first_row`, `first_key`: of the warp's scores, counted within the sequence. `kind`: what the mask
    // leaves of the block.
    FLASH_DEVICE void apply(Scores<Kernel> &S, int first_row, int first_key, int size, TileKind kind) const {
        if constexpr (!Mod::kHidesKeys) {
            if constexpr (Mod::kChangesScores) apply_some<true, false>(S, first_row, first_key, size);
        } else if (kind != TileKind::FULL) {
            apply_some<Mod::kChangesScores, true>(S, first_row, first_key, size);
        } else if constexpr (Mod::kChangesScores) {
            apply_some<true, false>(S, first_row, first_key, size);
        }
    }

    // Which weights of the warp's dropout keeps; arguments as of `apply`.
    FLASH_DEVICE auto kept_weights(int first_row, int first_key) const {
        if constexpr (Kernel::drops) {
            const MatrixCoordinate first = accumulator(computed_here(threadIdx.x % kWarpSize), 0);
            return KeptOfQueries<Kernel::m_tiles * kSquares>(
                HeadDropout(captured.dropout, batch, head), [&](int square) {
                    return MatrixCoordinate{first_row + square / kSquares * kMmaM + first.row,
                                            first_key + square % kSquares * kMmaN + first.column};
                });
        } else {
            return AllKept{};
        }
    }

  private:
    template <bool kScore, bool kMask>
    FLASH_DEVICE void apply_some(Scores<Kernel> &S, int first_row, int first_key, int size) const {
        const auto once = Mod::once(captured);
        const auto of_head = Mod::head(captured, once, batch, head);
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
            // Found out anew: else what follows from it for each column is held from tile to tile.
            const int lane = computed_here(threadIdx.x % kWarpSize);
            const int row = first_row + m * kMmaM + accumulator(lane, 0).row;  // and 8 rows further
            const typename Mod::Row rows[2] = {Mod::row(captured, once, of_head, batch, head, row),
                                               Mod::row(captured, once, of_head, batch, head, row + 8)};
            Known known;
            if constexpr (kScore) known.find(captured, batch, head, row, computed_here(first_key), lane);
#pragma unroll
            for (int n = 0; n < kSquares; ++n) {
                if (kScore && n % kStreamedSquares == 0) {
                    known.find_group(captured, batch, head, row, computed_here(first_key) + n * kMmaN, lane);
                }
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    // Found out anew, too: else ptxas works out all columns before the first element.
                    const int key = computed_here(first_key) + n * kMmaN + accumulator(lane, c).column;
                    const auto column = Mod::column(captured, once, of_head, batch, head, key);
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float &s = S.rmem[m][n][2 * r + c];
                        const float given = s;
                        if constexpr (kScore && knows_ahead<Mod>) {
                            s = Mod::score_ahead(captured, once, of_head, rows[r], column, known.at(r, n, c),
                                                 given, batch, head, row + 8 * r, key);
                        } else if constexpr (kScore) {
                            s = Mod::score(captured, once, of_head, rows[r], column, given, batch, head,
                                           row + 8 * r, key);
                        }
                        if constexpr (kMask) {
                            const bool seen = Mod::visible(captured, once, of_head, rows[r], column, given,
                                                           batch, head, row + 8 * r, key);
                            if (!seen) s = -INFINITY;
                        }
                    }
                }
                constexpr int first_place = kPlaces + kMask * Kernel::m_tiles * kSquares;
                divide_schedule(size, first_place + m * kSquares + n);
            }
        }
    }

    static constexpr int kPlaces = 1 << 16;  // of divide_schedule, behind those of the products
};

template <typename Kernel>
struct ScoreMods<Kernel, NoMod> {
    FLASH_DEVICE AllKept kept_weights(int, int) const { return {}; }
};

}  // namespace flash::ampere
