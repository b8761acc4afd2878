// The tiles of one item, in the order in which a consumer warpgroup takes them: from the last to the first,
// so that ragged and diagonal tiles, which need masks, come first and the steady loop has none
// (tile_walk.cuh).
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
#include "hopper/forward/tile_walk.cuh"

namespace flash::hopper {

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

// The first tile of a chunk of keys, with the last P V of the chunk before it: as overlapped_step, but rows
// begin anew, and what the other chunk has left of them is kept.
template <typename Kernel>
FLASH_DEVICE void begin_chunk(Consumer<Kernel> &wg) {
    const auto ended = wg.put_aside();
    if (!Kernel::direct_store)
        wg.take_item();  // anew: what follows from it takes no registers from chunk to chunk
    const auto v = wg.kv;
    wg.kv.advance();
    wg.enter_chunk();
    wg.use_slots(wg.kv.k_slot(), v.v_slot());
    wg.await_k();
    issue_both_products<Kernel::B_c>(wg, v, [&] { wg.await_turn(); });
    wg.await_scores();
    wg.release_tile(wg.smem.k_empty(wg.kv.k_slot()));
    wg.chunk_softmax();
    wg.await_pv(v.v_slot());
    wg.round_probabilities();
    wg.keep_sums(ended);
}

// All further tiles; P V lags by one.
template <typename Kernel>
FLASH_DEVICE void overlapped_tiles(Consumer<Kernel> &wg) {
    further_tiles<Kernel>(
        wg, [&] { overlapped_step<true>(wg); }, [&] { overlapped_step<false>(wg); },
        [&] { begin_chunk(wg); });
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
// The other warpgroups cover the softmax. `softmax` is that of a first tile, where it is one.
template <bool kFirst, bool kMasked, typename Kernel, typename Softmax>
FLASH_DEVICE void serial_step(Consumer<Kernel> &wg, const Softmax &softmax) {
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
        softmax();
        wg.round_probabilities();
    } else {
        scores_to_probabilities<kMasked>(wg, [] {});
    }
    if (kMasked && wg.kv_block == wg.last_block()) clear_hidden_values(wg, wg.item, wg.kv);
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
    serial_step<true, true>(wg, [&] { wg.first_softmax(); });
    further_tiles<Kernel>(
        wg, [&] { serial_step<false, true>(wg, [] {}); }, [&] { serial_step<false, false>(wg, [] {}); },
        [&] {
            wg.keep_sums(wg.row_state());
            wg.enter_chunk();
            serial_step<true, true>(wg, [&] { wg.chunk_softmax(); });
        });
    if (Kernel::direct_store) wg.release(wg.smem.q_empty(wg.q.slot()));
}

}  // namespace flash::hopper
