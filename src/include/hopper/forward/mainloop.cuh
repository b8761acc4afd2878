// The tiles of one item, in the order in which a consumer warpgroup takes them: from the last to the first,
// so that ragged and diagonal tiles, which need masks, come first and the steady loop has none.
//
// With overlap_products two products run at a time, and the softmax under them:
//
//     warpgroup     QK(n), PV(n+1) issued | wait QK(n) | softmax(n) | wait PV(n+1) | rescale O, round P | ...
//     tensor cores  [-- QK(n) --][-- PV(n+1) --]
//
// With ping_pong the warpgroups take turns to issue: while one is in its softmax, the tensor cores work for
// the others.
#pragma once

#include "hopper/forward/capped_steps.cuh"
#include "hopper/forward/hidden_values.cuh"

namespace flash::hopper {

// The tiles behind an item's first. Every row sees every key of most of them, which take `step`; those of
// which a mask hides something take `masked_step`.
template <typename Kernel, typename MaskedStep, typename Step>
FLASH_DEVICE void further_tiles(Consumer<Kernel> &wg, const MaskedStep &masked_step, const Step &step) {
    wg.go_to_next_tile();
    if constexpr (Kernel::masks_diagonal) {
        const int last_masked = wg.last_masked_block();
#pragma unroll 1
        for (; wg.kv_block >= last_masked; wg.go_to_next_tile()) masked_step();
    }
    const int first_whole = wg.first_whole_block();
#pragma unroll 1
    for (; wg.kv_block >= first_whole; wg.go_to_next_tile()) step();
    if constexpr (Kernel::traits.window) {
#pragma unroll 1
        for (; wg.kv_block >= wg.end_of_loops(); wg.go_to_next_tile()) masked_step();
    }
}

// With chunks of keys: the first tile of a chunk takes the masked step, too, which looks at each row. There
// is one copy of it, so that its instructions are at hand.
template <typename Kernel, typename MaskedStep, typename Step>
    requires(Kernel::chunk_tiles > 0)
FLASH_DEVICE void further_tiles(Consumer<Kernel> &wg, const MaskedStep &masked_step, const Step &step) {
    wg.go_to_next_tile();
    const int first_whole = wg.first_whole_block();
#pragma unroll 1
    while (wg.kv_block >= wg.end_of_loops()) {
        if (wg.needs_mask(wg.kv_block) || wg.begins_chunk()) {
            masked_step();
            wg.go_to_next_tile();
            continue;
        }
        const int end = max(first_whole, wg.kv_block / Kernel::chunk_tiles * Kernel::chunk_tiles);
#pragma unroll 1
        for (; wg.kv_block >= end; wg.go_to_next_tile()) step();
    }
}

// ---------------------------------------------------------------- two products at a time
// The first tile's scores and softmax, with nothing else in flight.
template <typename Kernel>
FLASH_DEVICE void begin_item(Consumer<Kernel> &wg) {
    wg.go_to_first_tile();
    wg.use_slots(wg.kv.k_slot(), wg.kv.v_slot());
    wg.await_k();
    wg.with_first_columns([&]<int n_columns>() {
        wg.products.template issue_qk<n_columns>(wg.rmem_S, wg.tiles, wg.rmem_Q);
        wgmma_wait<0>();
        pin_registers(wg.rmem_S);
    });
    wg.release_tile(wg.smem.k_empty(wg.kv.k_slot()));
    wg.first_softmax();
    wg.round_probabilities();
    wg.zero_output();
}

// Q K^T of the tile at wg.kv, which has arrived, and P V of the tile at v, in one turn.
template <int n_columns, typename Kernel, typename Position, typename AwaitTurn>
FLASH_DEVICE void issue_both_products(Consumer<Kernel> &wg, const Position &v, const AwaitTurn &await_turn) {
    await_turn();
    wg.products.template issue_qk<n_columns>(wg.rmem_S, wg.tiles, wg.rmem_Q);
    mbarrier_wait(wg.smem.v_full(v.v_slot()), v.v_phase());
    wg.products.issue_pv(wg.rmem_O, wg.rmem_P, wg.tiles, [&] { wg.pass_turn(); });
}

// A tile of which a mask of the user's leaves the warpgroup nothing: P V of the tile before, at v, alone,
// unless that one was passed over, too. P is 0 then.
template <typename Kernel, typename Position>
FLASH_DEVICE void pass_over_tile(Consumer<Kernel> &wg, const Position &v, bool has_weights) {
    wg.await_turn();
    mbarrier_wait(wg.smem.v_full(v.v_slot()), v.v_phase());
    if (has_weights) {
        wg.use_slots(wg.kv.k_slot(), v.v_slot());
        wg.products.issue_pv(wg.rmem_O, wg.rmem_P, wg.tiles, [&] { wg.pass_turn(); });
        wgmma_wait<0>();
        wg.pin_output();
#pragma unroll
        for (int i = 0; i < Kernel::B_c / 4; ++i) wg.rmem_P[i] = 0;
    } else {
        wg.pass_turn();
    }
    wg.release_tile(wg.smem.v_empty(v.v_slot()));
    wg.release_tile(wg.smem.k_empty(wg.kv.k_slot()));
}

template <bool kMasked, typename Kernel>
FLASH_DEVICE void overlapped_step(Consumer<Kernel> &wg) {
    const bool has_weights = !wg.sees_nothing();  // of the tile before
    const auto v = wg.kv;
    wg.kv.advance();
    if (!Kernel::mod_hides_keys) wg.use_slots(wg.kv.k_slot(), v.v_slot());
    wg.await_k();
    if (wg.sees_nothing()) return pass_over_tile(wg, v, has_weights);
    if (Kernel::mod_hides_keys) wg.use_slots(wg.kv.k_slot(), v.v_slot());
    issue_both_products<Kernel::B_c>(wg, v, [&] { wg.await_turn(); });
    wg.find_ahead();
    wg.look_back();
    wg.await_scores();
    scores_to_probabilities<kMasked>(wg, [&] { wg.await_pv(v.v_slot()); });
}

// All further tiles; P V lags by one.
template <typename Kernel>
FLASH_DEVICE void overlapped_tiles(Consumer<Kernel> &wg) {
    further_tiles(wg, [&] { overlapped_step<true>(wg); }, [&] { overlapped_step<false>(wg); });
    if (Kernel::direct_store) wg.release(wg.smem.q_empty(wg.q.slot()));
}

// The last P V of `item`, alone. With AFTER_LAST_PV it opens a turn that goes on with the next item.
template <typename Kernel>
FLASH_DEVICE void last_pv(Consumer<Kernel> &wg, const ItemOf<Kernel> &item) {
    clear_hidden_values(wg, item, wg.kv);
    wg.use_slots(wg.kv.k_slot(), wg.kv.v_slot());
    mbarrier_wait(wg.smem.v_full(wg.kv.v_slot()), wg.kv.v_phase());
    if constexpr (Kernel::cfg.next_item == NextItem::AFTER_LAST_PV) {
        if (Kernel::cfg.ping_pong) {
            wg.await_turn();
        } else {
            wg.sync_warpgroup();  // all warps are past their last read of the Q slot O goes to
        }
    }
    wg.products.issue_pv(wg.rmem_O, wg.rmem_P, wg.tiles, [] {});
    wgmma_wait<0>();
    wg.pin_output();
    wg.release_tile(wg.smem.v_empty(wg.kv.v_slot()));
    wg.kv.advance();
}

// ---------------------------------------------------------------- one product at a time
// The other warpgroups cover the softmax.
template <bool kFirst, bool kMasked, typename Kernel>
FLASH_DEVICE void serial_step(Consumer<Kernel> &wg) {
    wg.use_slots(wg.kv.k_slot(), wg.kv.v_slot());
    wg.await_k();
    wg.await_turn();
    wg.products.issue_qk(wg.rmem_S, wg.tiles, wg.rmem_Q);
    wg.pass_turn();
    if constexpr (!kFirst) {
        wg.find_ahead();
        wg.look_back();
    }
    wgmma_wait<0>();
    pin_registers(wg.rmem_S);
    if constexpr (kFirst) {
        wg.release_tile(wg.smem.k_empty(wg.kv.k_slot()));
        wg.first_softmax();
        wg.round_probabilities();
    } else {
        scores_to_probabilities<kMasked>(wg, [] {});
    }
    if (kMasked && wg.kv_block == wg.end_of_loops()) clear_hidden_values(wg, wg.item, wg.kv);
    mbarrier_wait(wg.smem.v_full(wg.kv.v_slot()), wg.kv.v_phase());
    wg.products.issue_pv(wg.rmem_O, wg.rmem_P, wg.tiles, [] {});
    wgmma_wait<0>();
    wg.pin_output();
    wg.release_tile(wg.smem.v_empty(wg.kv.v_slot()));
    wg.kv.advance();
}

template <typename Kernel>
FLASH_DEVICE void serial_tiles(Consumer<Kernel> &wg) {
    wg.go_to_first_tile();
    serial_step<true, true>(wg);
    further_tiles(wg, [&] { serial_step<false, true>(wg); }, [&] { serial_step<false, false>(wg); });
    if (Kernel::direct_store) wg.release(wg.smem.q_empty(wg.q.slot()));
}

}  // namespace flash::hopper
