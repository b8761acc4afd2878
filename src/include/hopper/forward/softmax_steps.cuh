// What becomes of the scores of a tile: the cap, the mask and the step of the softmax, and what O does when
// the step has moved a row's reference. mainloop.cuh puts the moves in order.
#pragma once

#include "hopper/forward/capped_softmax.cuh"
#include "hopper/forward/recompute.cuh"
#include "hopper/forward/softmax.cuh"
#include "hopper/mask_tile.cuh"

namespace flash::hopper {

// Of a softmax by row, and of chunks of keys.
template <typename Kernel>
struct ChunkState {};
template <typename Kernel>
    requires(Kernel::by_row)
struct ChunkState<Kernel> {
    float sum_before[2];  // of the last lagged step
    int end_of_loops;     // of the chunk in hand
};

// Consumer: what derives from it, with a softmax, scores, O and the item in hand.
template <typename Kernel, typename Consumer>
struct SoftmaxSteps {
    static constexpr int B_c = Kernel::B_c;
    static constexpr bool kByRow = Kernel::by_row;
    static constexpr bool kLagged = kByRow || Kernel::cfg.softmax_reference == SoftmaxReference::LAGGED;

    FLASH_DEVICE void first_softmax() {
        Consumer &wg = self();
        if constexpr (Kernel::traits.softcap && !kByRow) {
            wg.cap_form = wg.args.long_cap_series.end > 0.f ? CapForm::SHORT_SERIES : CapForm::ANY;
        }
        cap_scores();
        if constexpr (Kernel::has_mod) wg.template apply_mod<true>(true);
        if (Kernel::masks_diagonal || (wg.kv_block + 1) * B_c > wg.seq_len_k()) mask_tile();
        wg.softmax.template exact_step<true>(wg.rmem_S, wg.args.exponent_factor, wg.args.lowest,
                                             wg.score_start());
    }

    // capped_steps.cuh has that of lagged, capped scores.
    template <bool kMasked>
    FLASH_DEVICE void tile_softmax() {
        Consumer &wg = self();
        if constexpr (kByRow) return row_softmax<kMasked>();
        cap_scores();
        if constexpr (Kernel::has_mod) wg.template apply_mod<false>(true);
        if (kMasked) mask_tile();
        if (kLagged && !kMasked && !(Kernel::mod_hides_keys && wg.needs_exact_step)) {
            wg.softmax.lagged_step(wg.rmem_S, wg.args.exponent_factor, wg.score_start());
        } else {
            wg.softmax.template exact_step<false>(wg.rmem_S, wg.args.exponent_factor, wg.args.lowest,
                                                  wg.score_start());
        }
    }

    // Of the first tile of a chunk behind another.
    FLASH_DEVICE void chunk_softmax() {
        Consumer &wg = self();
        cap_scores();
        if (wg.needs_mask(wg.kv_block)) mask_tile();
        wg.softmax.template exact_step<true>(wg.rmem_S, wg.args.exponent_factor, wg.args.lowest);
    }

    template <bool kMasked>
    FLASH_DEVICE void row_softmax() {
        Consumer &wg = self();
        cap_scores();
        if constexpr (kMasked) {
            mask_tile();
            wg.softmax.row_step(wg.rmem_S, wg.args.exponent_factor, wg.args.inv_exponent_factor,
                                wg.args.lowest);
        } else {
            wg.chunks.sum_before[0] = wg.softmax.sum[0];
            wg.chunks.sum_before[1] = wg.softmax.sum[1];
            wg.softmax.lagged_step(wg.rmem_S, wg.args.exponent_factor);
        }
    }

    // O follows the step's change of reference. No wgmma is in flight.
    template <bool kMasked>
    FLASH_DEVICE void settle_softmax() {
        Consumer &wg = self();
        if constexpr (kByRow) {
            return settle_row_softmax<kMasked>();
        } else if constexpr (kLagged && !kMasked) {
            if (Kernel::mod_hides_keys && wg.needs_exact_step)
                return scale_rows(wg.rmem_O, wg.softmax.rescale);
            if (!wg.softmax.warp_outgrew(kToleratedGrowth)) return;
            if (wg.softmax.warp_outgrew(kRescalableGrowth)) {
                undo_lagged_step();
                wg.begin_scores();
                recompute_scores<Kernel>(wg.rmem_S, wg.smem.q(wg.q.slot()), wg.smem.k(wg.kv.k_slot()),
                                         wg.warpgroup * kWarpgroupRows + wg.warp * 16, wg.lane);
                cap_scores();
                if constexpr (Kernel::has_mod)
                    wg.template apply_mod<true, false>(false);  // what was copied is released
                wg.softmax.template exact_step<false>(wg.rmem_S, wg.args.exponent_factor, wg.args.lowest,
                                                      wg.score_start());
            } else {
                wg.softmax.adopt_growth(wg.rmem_S, wg.args.exponent_factor, wg.args.inv_exponent_factor);
            }
        } else if constexpr (Kernel::cfg.softmax_reference == SoftmaxReference::EXACT_SKIP_RESCALE) {
            if (!__any_sync(kAllLanes, fminf(wg.softmax.rescale[0], wg.softmax.rescale[1]) != 1.f)) return;
        }
        scale_rows(wg.rmem_O, wg.softmax.rescale);
    }

    template <bool kMasked>
    FLASH_DEVICE void settle_row_softmax() {
        Consumer &wg = self();
        if constexpr (!kMasked) {
            if (!wg.softmax.warp_outgrew(kToleratedGrowthByRow)) return;
            if (wg.softmax.warp_outgrew(kRescalableGrowth)) {
                wg.softmax.sum[0] = wg.chunks.sum_before[0];
                wg.softmax.sum[1] = wg.chunks.sum_before[1];
                wg.begin_scores();
                // Chunks leave no registers for addresses that are found before the loop.
                const int own_lane = Kernel::chunk_tiles > 0 ? computed_here(wg.lane) : wg.lane;
                recompute_scores<Kernel>(wg.rmem_S, wg.smem.q(wg.q.slot()), wg.smem.k(wg.kv.k_slot()),
                                         wg.warpgroup * kWarpgroupRows + wg.warp * 16, own_lane);
                cap_scores();
                wg.softmax.row_step(wg.rmem_S, wg.args.exponent_factor, wg.args.inv_exponent_factor,
                                    wg.args.lowest);
            } else {
                wg.softmax.adopt_growth_of_rows(wg.rmem_S, wg.args.exponent_factor,
                                                wg.args.inv_exponent_factor);
            }
        }
        scale_rows(wg.rmem_O, wg.softmax.rescale);
    }

    FLASH_DEVICE void undo_lagged_step() {
        Consumer &wg = self();
        // NaN looks like an unusable step, where no step can be; others are known to the whole warp.
        if (Kernel::traits.softcap && wg.cap_form != CapForm::ANY && wg.softmax.growth[0] == kUnusableStep) {
            wg.cap_form = CapForm::LONG_SERIES;  // unless cap_scores finds that it does not hold either
        } else {
            wg.softmax.undo_lagged_step(wg.rmem_S);
        }
    }

    // Scores become tanh(score_factor S); softcap is a part of exponent_factor.
    FLASH_DEVICE void cap_scores() {
        Consumer &wg = self();
        if constexpr (Kernel::traits.softcap && kByRow) {
            cap_any_scores(wg.rmem_S, wg.args.score_factor, wg.args.exponent_factor);  // by the score alone
        } else if constexpr (Kernel::traits.softcap) {
            if (!flash::cap_scores<kLongTerms>(wg.rmem_S, wg.args.score_factor, wg.args.exponent_factor))
                wg.cap_form = CapForm::ANY;
        }
    }

    FLASH_DEVICE void mask_tile() {
        Consumer &wg = self();
        const int row0 = wg.first_row() + wg.warp * 16 + accumulator(wg.lane, 0).row;
        const int first_column = wg.kv_block * B_c;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = row0 + 8 * r;
            if constexpr (Kernel::traits.planned && Kernel::masks_diagonal) {
                row = wg.query_of(wg.warpgroup * kWarpgroupRows + wg.warp * 16 + accumulator(wg.lane, 0).row +
                                  8 * r);
            }
            if constexpr (Kernel::traits.window) {
                keep_columns<B_c, true>(wg.rmem_S, r, wg.lane, wg.mask().visible_end(row) - first_column,
                                        wg.mask().visible_begin(row) - first_column);
            } else {
                const int last_visible = row + wg.seq_len_k() - wg.seq_len_q();  // bottom-right
                const int n_visible =
                    Kernel::traits.causal ? min(wg.seq_len_k(), last_visible + 1) : wg.seq_len_k();
                keep_columns<B_c>(wg.rmem_S, r, wg.lane, n_visible - first_column);
            }
        }
    }

  private:
    FLASH_DEVICE Consumer &self() { return static_cast<Consumer &>(*this); }
    FLASH_DEVICE const Consumer &self() const { return static_cast<const Consumer &>(*this); }
};

}  // namespace flash::hopper
