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

#include "hopper/consumer.cuh"

namespace flash::hopper {

// ---------------------------------------------------------------- two products at a time
// The first tile's scores and softmax, with nothing else in flight.
template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
FLASH_DEVICE void begin_item(Consumer<CFG, TRAITS> &wg) {
    wg.kv_block = wg.leading_kv_block();
    wg.skip_leading_tiles();
    wg.use_slots(wg.kv.slot(), wg.kv.slot());
    mbarrier_wait(wg.smem.k_full(wg.kv.slot()), wg.kv.phase());
    wg.products.issue_qk(wg.rmem_S, wg.tiles);
    wgmma_wait<0>();
    pin_registers(wg.rmem_S);
    wg.release(wg.smem.k_empty(wg.kv.slot()));
    wg.first_softmax();
    wg.round_weights();
    wg.zero_output();
}

// Q K^T of the tile at wg.kv and P V of the tile at v, in one turn. With prepared_turns nothing is waited for
// within the turn: the tensor cores stand still between one warpgroup's last product and the next one's
// first.
template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS, typename RingPosition, typename AwaitTurn>
FLASH_DEVICE void issue_both_products(Consumer<CFG, TRAITS> &wg, const RingPosition &v,
                                      const AwaitTurn &await_turn) {
    wg.use_slots(wg.kv.slot(), v.slot());
    mbarrier_wait(wg.smem.k_full(wg.kv.slot()), wg.kv.phase());
    if (CFG.prepared_turns) mbarrier_wait(wg.smem.v_full(v.slot()), v.phase());
    await_turn();
    if (CFG.prepared_turns) wg.pin_output();
    wg.products.issue_qk(wg.rmem_S, wg.tiles);
    if (!CFG.prepared_turns) mbarrier_wait(wg.smem.v_full(v.slot()), v.phase());
    wg.products.template issue_pv<CFG.prepared_turns>(wg.rmem_O, wg.rmem_P, wg.tiles,
                                                      [&] { wg.pass_turn(); });
}

template <bool kMasked, HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
FLASH_DEVICE void overlapped_step(Consumer<CFG, TRAITS> &wg) {
    const auto v = wg.kv;
    wg.kv.advance();
    issue_both_products(wg, v, [&] { wg.await_turn(); });
    wg.await_scores(v.slot());
    if (kMasked || !wg.kLagged) wg.release(wg.smem.k_empty(wg.kv.slot()));
    wg.template tile_softmax<kMasked>();
    wg.await_pv(v.slot());
    wg.template settle_softmax<kMasked>();
    if (!kMasked && wg.kLagged) wg.release(wg.smem.k_empty(wg.kv.slot()));  // held for the recomputation
    wg.round_weights();
}

// All further tiles; P V lags by one.
template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
FLASH_DEVICE void overlapped_tiles(Consumer<CFG, TRAITS> &wg) {
    --wg.kv_block;
    if constexpr (Consumer<CFG, TRAITS>::Static::kMasksDiagonal) {
        const int last_masked = wg.last_masked_block();
#pragma unroll 1
        for (; wg.kv_block >= last_masked; --wg.kv_block) overlapped_step<true>(wg);
    }
    const int first_whole = wg.first_whole_block();
#pragma unroll 1
    for (; wg.kv_block >= first_whole; --wg.kv_block) overlapped_step<false>(wg);
    if constexpr (TRAITS.window) {
#pragma unroll 1
        for (; wg.kv_block >= wg.end_of_loops(); --wg.kv_block) overlapped_step<true>(wg);
    }
    if (Consumer<CFG, TRAITS>::Static::kDirectStore) wg.release(wg.smem.q_empty(wg.q.slot()));
}

// The last P V of an item, alone. With AFTER_LAST_PV it opens a turn that goes on with the next item.
template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
FLASH_DEVICE void last_pv(Consumer<CFG, TRAITS> &wg) {
    wg.use_slots(wg.kv.slot(), wg.kv.slot());
    mbarrier_wait(wg.smem.v_full(wg.kv.slot()), wg.kv.phase());
    if constexpr (CFG.next_item == NextItem::AFTER_LAST_PV) {
        if (CFG.ping_pong) {
            wg.await_turn();
        } else {
            wg.sync_warpgroup();  // all warps are past their last read of the Q slot O goes to
        }
    }
    wg.products.template issue_pv<false>(wg.rmem_O, wg.rmem_P, wg.tiles, [] {});
    wgmma_wait<0>();
    wg.pin_output();
    wg.release(wg.smem.v_empty(wg.kv.slot()));
    wg.kv.advance();
}

// ---------------------------------------------------------------- one product at a time
// The other warpgroups cover the softmax.
template <bool kFirst, bool kMasked, HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
FLASH_DEVICE void serial_step(Consumer<CFG, TRAITS> &wg) {
    wg.use_slots(wg.kv.slot(), wg.kv.slot());
    mbarrier_wait(wg.smem.k_full(wg.kv.slot()), wg.kv.phase());
    wg.await_turn();
    wg.products.issue_qk(wg.rmem_S, wg.tiles);
    wg.pass_turn();
    wgmma_wait<0>();
    pin_registers(wg.rmem_S);
    if constexpr (kFirst) {
        wg.release(wg.smem.k_empty(wg.kv.slot()));
        wg.first_softmax();
    } else {
        if (kMasked || !wg.kLagged) wg.release(wg.smem.k_empty(wg.kv.slot()));
        wg.template tile_softmax<kMasked>();
        wg.template settle_softmax<kMasked>();
        if (!kMasked && wg.kLagged) wg.release(wg.smem.k_empty(wg.kv.slot()));  // held for the recomputation
    }
    wg.round_weights();
    mbarrier_wait(wg.smem.v_full(wg.kv.slot()), wg.kv.phase());
    wg.products.template issue_pv<false>(wg.rmem_O, wg.rmem_P, wg.tiles, [] {});
    wgmma_wait<0>();
    wg.pin_output();
    wg.release(wg.smem.v_empty(wg.kv.slot()));
    wg.kv.advance();
}

template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
FLASH_DEVICE void serial_tiles(Consumer<CFG, TRAITS> &wg) {
    wg.kv_block = wg.leading_kv_block();
    wg.skip_leading_tiles();
    serial_step<true, true>(wg);
    --wg.kv_block;
    if constexpr (Consumer<CFG, TRAITS>::Static::kMasksDiagonal) {
        const int last_masked = wg.last_masked_block();
#pragma unroll 1
        for (; wg.kv_block >= last_masked; --wg.kv_block) serial_step<false, true>(wg);
    }
    const int first_whole = wg.first_whole_block();
#pragma unroll 1
    for (; wg.kv_block >= first_whole; --wg.kv_block) serial_step<false, false>(wg);
    if constexpr (TRAITS.window) {
#pragma unroll 1
        for (; wg.kv_block >= wg.end_of_loops(); --wg.kv_block) serial_step<false, true>(wg);
    }
    if (Consumer<CFG, TRAITS>::Static::kDirectStore) wg.release(wg.smem.q_empty(wg.q.slot()));
}

}  // namespace flash::hopper
