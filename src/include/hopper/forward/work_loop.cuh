// The items of a consumer warpgroup, one after another or one into the other.
//
// Between two items a warpgroup has no product to hide its work under: the last P V, the division, the store
// of O, and the first Q K^T and softmax of the next item stand in a row. With next_item the next item's first
// product joins the last P V, or follows it directly with the store of O under it.
#pragma once

#include "hopper/forward/idle_items.cuh"

namespace flash::hopper {

template <typename Kernel>
FLASH_DEVICE void run_item_alone(Consumer<Kernel> &wg) {
    if (is_idle(wg)) {
        pass_first_tile(wg);
        pass_further_tiles(wg);
        pass_last_value(wg);
        wg.q.advance();
        return wg.fetch_item();
    }
    if constexpr (Kernel::cfg.overlap_products) {
        begin_item(wg);
        overlapped_tiles(wg);
    } else {
        wg.zero_output();
        serial_tiles(wg);
    }
    const uint32_t q_slot = wg.q.slot();
    wg.q.advance();
    if constexpr (Kernel::cfg.overlap_products) last_pv(wg, wg.item);
    if (!Kernel::direct_store)
        wg.sync_warpgroup();  // all warps are past their last read of the Q slot O goes to
    wg.finish(wg.item, wg.row_state(), q_slot);
    wg.fetch_item();
}

// The tiles of this item but the first, and the first of the next. False: there is no next item.
template <typename Kernel>
FLASH_DEVICE bool run_item_and_begin_next(Consumer<Kernel> &wg) {
    const bool was_idle = is_idle(wg);
    if (was_idle) {
        pass_further_tiles(wg);
    } else {
        overlapped_tiles(wg);
    }
    const uint32_t q_slot = wg.q.slot();
    const ItemOf<Kernel> done = wg.item;
    wg.q.advance();
    const auto finish = [&] { wg.finish(done, wg.row_state(), q_slot); };
    if constexpr (Kernel::cfg.next_item == NextItem::AFTER_LAST_PV) {
        if (was_idle) {
            wg.await_turn();
            pass_last_value(wg);
        } else {
            last_pv(wg, done);
        }
        wg.fetch_item();
        if (wg.item.end_kv_block < 0) {
            wg.pass_turn();
            if (!was_idle) finish();
            return false;
        }
        if (Kernel::idles && passed_after_last_pv(wg, was_idle, finish)) return true;
        wg.go_to_first_tile();
        wg.use_slots(wg.kv.k_slot(), wg.kv.v_slot());
        wg.await_k();
        wg.with_first_columns([&]<int n_columns>() {
            wg.products.template issue_qk<n_columns>(wg.rmem_S, wg.tiles, wg.rmem_Q);
            wg.pass_turn();
            finish();  // normalise and store under the next first product
            wgmma_wait<0>();
            pin_registers(wg.rmem_S);
        });
        wg.release_tile(wg.smem.k_empty(wg.kv.k_slot()));
        wg.first_softmax();
        wg.round_probabilities();
    } else {
        wg.fetch_item();
        if (wg.item.end_kv_block < 0) {
            if (was_idle) {
                pass_last_value(wg);
                return false;
            }
            last_pv(wg, done);
            wg.sync_warpgroup();  // as in run_item_alone
            finish();
            return false;
        }
        if (Kernel::idles && passed_with_last_pv(wg, done, was_idle, finish)) return true;
        const auto v = wg.kv;
        clear_hidden_values(wg, done, v);
        wg.kv.advance();
        wg.go_to_first_tile();
        const auto state = wg.put_aside();
        wg.use_slots(wg.kv.k_slot(), v.v_slot());
        wg.await_k();
        wg.with_first_columns([&]<int n_columns>() {
            issue_both_products<n_columns>(wg, v, [&] {
                if (Kernel::cfg.ping_pong) {
                    wg.await_turn();
                } else {
                    wg.sync_warpgroup();  // all warps are past their last read of the Q slot O goes to
                }
            });
            wg.await_scores();
            wg.release_tile(wg.smem.k_empty(wg.kv.k_slot()));
            if (Kernel::mod_hides_keys) wg.await_pv(v.v_slot());  // as for hidden_softmax
            wg.first_softmax();
            if (!Kernel::mod_hides_keys) wg.await_pv(v.v_slot());
        });
        wg.round_probabilities();
        wg.finish(done, state, q_slot);
        if (Kernel::chunk_tiles > 0) __syncwarp();  // else ptxas does not know the warp to be in one place
    }
    return true;
}

// From the first item to the end.
template <typename Kernel>
FLASH_DEVICE void run_consumer(Consumer<Kernel> &wg) {
    if (Kernel::cfg.ping_pong && wg.warpgroup == 0) wg.pass_turn_to(0);  // the first turn is this warpgroup's
    wg.fetch_item();
    if constexpr (Kernel::cfg.next_item == NextItem::NONE) {
        while (wg.item.end_kv_block > 0) run_item_alone(wg);
    } else if (wg.item.end_kv_block > 0) {
        if (is_idle(wg)) {
            pass_first_tile(wg);
        } else {
            begin_item(wg);
        }
        while (run_item_and_begin_next(wg)) wg.zero_output();
    }
    if (Kernel::cfg.ping_pong && wg.warpgroup == 0)
        wg.await_turn();  // takes the last pass: barriers end as they began
}

}  // namespace flash::hopper
