// What becomes of a tile's soft-capped scores: the rounded P, by the shortest series that holds.
//
// A step that met a score beyond its series is not used: its scores are computed again, and the warp takes
// the next longer form until its item ends.
//
// A step that can be used goes on to the rounded P before the branches of the forms meet. P would stand in
// other registers in each of them otherwise, and half of it would be moved.
#pragma once

#include "hopper/forward/capped_softmax.cuh"
#include "hopper/forward/consumer.cuh"

namespace flash::hopper {

// `drain` waits for the P V that runs beside. False: the step has to be settled.
template <int kTerms, typename Kernel, typename Drain>
FLASH_DEVICE bool use_series(Consumer<Kernel> &wg, const TanhSeries<kTerms> &series, const Drain &drain) {
    constexpr bool kGrowth = kSeesGrowth<Kernel, kTerms>;
    auto &softmax = wg.softmax;
    const SeriesStep step = series_step<kGrowth, kOrdersSeries<Kernel>>(
        softmax, wg.rmem_S, wg.args.score_factor, wg.args.exponent_factor, series);
    const int growth = max(softmax.growth[0], softmax.growth[1]);
    bool unusable = step.out_of_range(series);
    if (kGrowth) unusable |= growth > __float_as_int(kToleratedGrowth);
    // It also keeps the exponentials before the wait for P V (Consumer::await_pv).
    if (!kGrowth || Kernel::cfg.forced_overlap) unusable |= fmaxf(step.sum[0], step.sum[1]) > kLargestSum;
    unusable = __any_sync(kAllLanes, unusable);
    drain();
    if (!unusable) {
        softmax.sum[0] += step.sum[0];
        softmax.sum[1] += step.sum[1];
        wg.release_tile(wg.smem.k_empty(wg.kv.k_slot()));
        wg.round_probabilities();
        return true;
    }
    store_shared(wg.smem.sink(), 1);  // else what only this path needs would be done for both
    const bool outgrown = growth > __float_as_int(kRescalableGrowth);
    if (kGrowth && !__any_sync(kAllLanes, step.out_of_range(series) | outgrown)) {
        softmax.sum[0] += step.sum[0];
        softmax.sum[1] += step.sum[1];
    } else {
        softmax.growth[0] = kUnusableStep;
        if constexpr (Kernel::n_consumers <= 2) {  // three and four have no registers for it
#pragma unroll
            for (int i = 0; i < Kernel::B_c / 2; ++i) wg.rmem_S[i] = 0.f;  // P is not read any more
        }
    }
    return false;
}

// The softmax of a tile without a mask behind the first. False: the step has to be settled.
template <typename Kernel, typename Drain>
FLASH_DEVICE bool capped_softmax(Consumer<Kernel> &wg, const Drain &drain) {
    if (wg.cap_form == CapForm::SHORT_SERIES) return use_series(wg, wg.args.short_cap_series, drain);
    CapForm form = wg.cap_form;
    // Of two comparisons in a row the compiler would make an indirect branch, which every step waits for.
    if (kOrdersSeries<Kernel>) form = static_cast<CapForm>(computed_here(static_cast<int>(form)));
    if (form == CapForm::LONG_SERIES) return use_series(wg, wg.args.long_cap_series, drain);
    cap_any_scores(wg.rmem_S, wg.args.score_factor, wg.args.exponent_factor);
    wg.softmax.lagged_step(wg.rmem_S, wg.args.exponent_factor);
    drain();
    return false;
}

// From a tile's scores to the rounded P; its K slot is released. `drain`: as above.
template <bool kMasked, typename Kernel, typename Drain>
FLASH_DEVICE void scores_to_probabilities(Consumer<Kernel> &wg, const Drain &drain) {
    constexpr bool kSettled = Kernel::by_row && kMasked;
    if constexpr (Kernel::traits.softcap && wg.kLagged && !wg.kByRow && !kMasked) {
        if (capped_softmax(wg, drain)) return;
        wg.template settle_softmax<kMasked>();
    } else {
        if (kMasked || !wg.kLagged) wg.release_tile(wg.smem.k_empty(wg.kv.k_slot()));
        wg.template tile_softmax<kMasked>();
        drain();
        // By row P is final then, and a chunk of keys that ends needs its registers.
        if (kSettled) wg.round_probabilities();
        wg.template settle_softmax<kMasked>();
    }
    if (!kMasked && wg.kLagged)
        wg.release_tile(wg.smem.k_empty(wg.kv.k_slot()));  // held for the recomputation
    if (!kSettled) wg.round_probabilities();
}

}  // namespace flash::hopper
