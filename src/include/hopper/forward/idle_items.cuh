// Planned items that have no rows for a warpgroup: those of sequences that decode have a few in a block of
// 128. The warpgroup passes their tiles on, in turn, and computes nothing.
#pragma once

#include "hopper/forward/mainloop.cuh"

namespace flash::hopper {

// Whether none of the rows of the item in hand is the warpgroup's. The same for all its threads.
template <typename Kernel>
FLASH_DEVICE bool is_idle(const Consumer<Kernel> &wg) {
    if constexpr (Kernel::idles) {
        const PlannedLaunch &planned = wg.args.planned;
        const int queries =
            wg.item.all_queries - wg.item.q_block * planned.block_queries;  // padding is cleared
        const int rows = min(queries, planned.block_queries) * planned.group;
        return __shfl_sync(kAllLanes, rows, 0) <= wg.warpgroup * kWarpgroupRows;
    }
    return false;
}

// What begin_item is to others.
template <typename Kernel>
FLASH_DEVICE void pass_first_tile(Consumer<Kernel> &wg) {
    wg.go_to_first_tile();
    wg.await_k();
    wg.release_tile(wg.smem.k_empty(wg.kv.k_slot()));
}

template <typename Kernel>
FLASH_DEVICE void pass_last_value(Consumer<Kernel> &wg) {
    mbarrier_wait(wg.smem.v_full(wg.kv.v_slot()), wg.kv.v_phase());
    wg.release_tile(wg.smem.v_empty(wg.kv.v_slot()));
    wg.kv.advance();
}

// What overlapped_tiles is to others.
template <typename Kernel>
FLASH_DEVICE void pass_further_tiles(Consumer<Kernel> &wg) {
    wg.go_to_next_tile();
#pragma unroll 1
    for (; wg.kv_block >= wg.last_block(); wg.go_to_next_tile()) {
        const auto v = wg.kv;
        wg.kv.advance();
        wg.await_k();
        wg.await_turn();
        wg.pass_turn();
        wg.release_tile(wg.smem.k_empty(wg.kv.k_slot()));
        mbarrier_wait(wg.smem.v_full(v.v_slot()), v.v_phase());
        wg.release_tile(wg.smem.v_empty(v.v_slot()));
    }
    wg.release(wg.smem.q_empty(wg.q.slot()));
}

// The first tile of an item that follows an idle one, in the turn that is open.
template <typename Kernel>
FLASH_DEVICE void begin_after_idle(Consumer<Kernel> &wg) {
    wg.products.issue_qk(wg.rmem_S, wg.tiles, wg.rmem_Q);
    wg.pass_turn();
    wgmma_wait<0>();
    pin_registers(wg.rmem_S);
    wg.release_tile(wg.smem.k_empty(wg.kv.k_slot()));
    wg.first_softmax();
    wg.round_probabilities();
}

// From one item to the next, with NextItem::AFTER_LAST_PV, behind the last P V: the turn is open. False: the
// warpgroup has rows in both, and nothing was done.
template <typename Kernel, typename Finish>
FLASH_DEVICE bool passed_after_last_pv(Consumer<Kernel> &wg, bool was_idle, const Finish &finish) {
    if (is_idle(wg)) {
        wg.pass_turn();
        if (!was_idle) finish();
        pass_first_tile(wg);
        return true;
    }
    if (!was_idle) return false;
    wg.go_to_first_tile();
    wg.use_slots(wg.kv.k_slot(), wg.kv.v_slot());
    wg.await_k();
    begin_after_idle(wg);
    return true;
}

// The same with NextItem::WITH_LAST_PV, before the last P V, which takes the next turn.
template <typename Kernel, typename Finish>
FLASH_DEVICE bool passed_with_last_pv(Consumer<Kernel> &wg, const ItemOf<Kernel> &done, bool was_idle,
                                      const Finish &finish) {
    const bool idle = is_idle(wg);
    if (!was_idle && !idle) return false;
    if (!was_idle) {
        wg.await_turn();
        last_pv(wg, done);
        wg.pass_turn();
        finish();
        pass_first_tile(wg);
        return true;
    }
    pass_last_value(wg);
    wg.go_to_first_tile();
    wg.use_slots(wg.kv.k_slot(), wg.kv.v_slot());
    wg.await_k();
    wg.await_turn();
    if (idle) {
        wg.pass_turn();
        wg.release_tile(wg.smem.k_empty(wg.kv.k_slot()));
    } else {
        begin_after_idle(wg);
    }
    return true;
}

}  // namespace flash::hopper
