// The steps of a consumer warpgroup, one query block each, item after item.
//
//     dP(i) | exponentials of S(i) | dV(i) | dS(i) -> shared | dK(i) | dQ | S(i + 1), and dQ to the sums
//     under it
//
// P = 2^(S c - LSE) needs no maximum: nothing stands between S and the exponentials. S of the next block,
// also of the next item, is issued before dQ leaves.
//
// With late_dq this is dQ(i - 1): what it reads has been written a step ago by both warpgroups, which then
// need not wait for each other. Otherwise it is dQ(i), and they do. With ping_pong one warpgroup's
// exponentials and dS meet the other's products of dK, dQ and S.
#pragma once

#include "hopper/backward/kept_dq.cuh"

namespace flash::hopper {

// Waits for the item that follows; its number of steps, or kEndOfItems.
template <typename Kernel>
FLASH_DEVICE int await_next_item(BackwardConsumer<Kernel> &wg) {
    ++wg.items;
    wg.await_item();
    return load_shared_int(wg.smem.item(wg.slot(wg.items, Kernel::k_stages)) + kItemStepsOffset);
}

// The scores of the block at wg.blocks, of the item at wg.items. Without such a block what is computed is not
// used: a product that only some steps issue would make each wait for the one before.
template <typename Kernel>
FLASH_DEVICE void issue_scores(BackwardConsumer<Kernel> &wg) {
    const uint32_t word =
        wg.uniform_word(wg.slot(wg.blocks, Kernel::q_stages) | wg.slot(wg.items, Kernel::k_stages) << 8);
    wg.products.issue_scores(wg.rmem_S, word >> 8, word & 255);
}

// Remembers where dQ of the block in hand goes ...
template <typename Kernel>
FLASH_DEVICE void note_dq(BackwardConsumer<Kernel> &wg) {
    if constexpr (Kernel::keeps_dq) {
        wg.kept = part_of_block(wg);
    } else {
        wg.noted_dq_tile = wg.dq_tile_of_warp();
    }
}

// ... and sends it there.
template <typename Kernel, int n>
FLASH_DEVICE void send_dq(const BackwardConsumer<Kernel> &wg, float (&rmem_dQ)[n]) {
    if constexpr (Kernel::keeps_dq) {
        leave_dq(wg, rmem_dQ);
    } else {
        wg.send_dq(rmem_dQ, wg.noted_dq_tile);
    }
}

// Block `i` of the item; the number of steps of the next item where this is the last one. kHidden: none of
// its queries sees a key of this warpgroup, which takes part in dQ alone.
template <bool kHidden, typename Kernel>
FLASH_DEVICE int backward_step(BackwardConsumer<Kernel> &wg, int i) {
    constexpr int kQ = Kernel::q_stages, kK = Kernel::k_stages, kV = Kernel::v_stages;
    const bool first = i == 0, last = i + 1 == wg.item.n_steps;
    const uint32_t q_slot = wg.slot(wg.blocks, kQ);
    const uint32_t word =
        wg.uniform_word(q_slot | wg.slot(wg.items, kV) << 8 | ((wg.blocks + Kernel::late_dq) % 2) << 16 |
                        wg.slot(wg.items + (Kernel::late_dq && first ? kK - 1 : 0), kK) << 24);
    const uint32_t uniform_q = word & 255, uniform_v = word >> 8 & 255, uniform_ds = word >> 16 & 255,
                   uniform_k = word >> 24;
    // Without dQ nobody reads K after the scores.
    if (!Kernel::sums_dq && last) wg.release(wg.smem.k_empty(wg.slot(wg.items, kK)));

    if constexpr (!kHidden && Kernel::signs_dropped) wg.draw();  // while S alone is in registers
    if constexpr (!kHidden) wg.modify_scores();
    mbarrier_wait(wg.smem.do_full(q_slot), wg.phase(wg.blocks, kQ));
    wg.clear_unseen_queries();
    wg.await_turn();
    uint32_t rmem_dS[Kernel::B_r / 4];
    if constexpr (kHidden) {
#pragma unroll
        for (int j = 0; j < Kernel::B_r / 4; ++j) rmem_dS[j] = 0;
    } else {
        float rmem_dP[Kernel::B_r / 2];
        uint32_t rmem_P[Kernel::B_r / 4];
        wg.products.issue_dp(rmem_dP, uniform_v, uniform_q);
        wg.probabilities(rmem_P, rmem_dS);
        wg.products.issue_dv(wg.rmem_dV, rmem_P, uniform_q);
        wgmma_wait<1>();  // dP is there
        pin_registers(rmem_dP);
        wg.score_gradients(rmem_dS, rmem_P, rmem_dP);
    }
    if (last) wg.release(wg.smem.v_empty(wg.slot(wg.items, kV)));
    if constexpr (Kernel::sums_dq) {
        mbarrier_wait(wg.smem.ds_empty(wg.slot(wg.blocks, 2)), wg.phase(wg.blocks, 2) ^ 1);
        wg.store_score_gradients(rmem_dS);
    }
    if constexpr (!kHidden) wg.products.issue_dk(wg.rmem_dK, rmem_dS, uniform_q);
    if constexpr (Kernel::sums_dq) {
        fence_async_proxy();  // the products of both warpgroups must see dS
        __syncwarp();         // ... of every lane
        wg.release(wg.smem.ds_full(wg.slot(wg.blocks, 2)));
    }
    wg.pass_turn();

    float rmem_dQ[wg.kDqRegisters];
    if constexpr (Kernel::sums_dq) {
        const uint32_t read = wg.blocks - Kernel::late_dq;  // whose dS; before the first step of all nobody's
        if (!Kernel::late_dq || wg.blocks > 0) {
            mbarrier_wait(wg.smem.ds_full(wg.slot(read, 2)), wg.phase(read, 2));
        }
        wg.products.issue_dq(rmem_dQ, uniform_ds, uniform_k);
        wgmma_wait<1>();  // dV and dK are done
        wg.release(wg.smem.q_empty(q_slot));
        // The load warp may wait for this before it brings the K that is waited for below.
        if (Kernel::late_dq && first && last) {
            wgmma_wait<0>();
            if (wg.blocks > 0) wg.release(wg.smem.k_empty(wg.slot(wg.items + kK - 1, kK)));
        }
        if (!Kernel::late_dq && kK == 1 && last) {
            wgmma_wait<0>();
            wg.release(wg.smem.k_empty(0));
        }
    }
    ++wg.blocks;

    int next_steps = kEndOfItems;
    if (last) next_steps = await_next_item(wg);
    if (!last || next_steps != kEndOfItems) {
        mbarrier_wait(wg.smem.q_full(wg.slot(wg.blocks, kQ)), wg.phase(wg.blocks, kQ));
    }
    if constexpr (!Kernel::sums_dq && Kernel::B_r == 128) wgmma_wait<0>();  // no registers for both
    issue_scores(wg);
    wgmma_wait<1>();  // dQ is done; without it dV and dK
    if constexpr (!Kernel::sums_dq) {
        wg.release(wg.smem.q_empty(q_slot));
    } else if constexpr (Kernel::late_dq) {
        pin_registers(rmem_dQ);
        if (wg.blocks > 1) {
            wg.release(wg.smem.ds_empty(wg.slot(wg.blocks, 2)));
            if (first && !last) wg.release(wg.smem.k_empty(wg.slot(wg.items + kK - 1, kK)));
            send_dq(wg, rmem_dQ);
        }
        note_dq(wg);
    } else {
        pin_registers(rmem_dQ);
        wg.release(wg.smem.ds_empty(wg.slot(wg.blocks - 1, 2)));
        if (last && kK > 1) wg.release(wg.smem.k_empty(wg.slot(wg.items + kK - 1, kK)));
        note_dq(wg);
        send_dq(wg, rmem_dQ);
    }
    wg.go_to_next_block();
    wg.read_ahead();
    if (last) {  // what follows is of another item
        wg.known.forget();
    } else {
        wg.find_ahead();
    }
    wgmma_wait<0>();
    pin_registers(wg.rmem_S);
    pin_registers(wg.rmem_dK);
    pin_registers(wg.rmem_dV);
    return next_steps;
}

// From the first item to the end.
template <typename Kernel>
FLASH_DEVICE void run_backward_consumer(BackwardConsumer<Kernel> &wg) {
    if (Kernel::cfg.ping_pong && wg.warpgroup == 1) wg.pass_turn();  // the first turn is warpgroup 0's
    wg.await_item();
    wg.take_item();
    if (wg.item.n_steps != kEndOfItems) {
        mbarrier_wait(wg.smem.q_full(0), 0);
        issue_scores(wg);
        wg.read_ahead();
        wgmma_wait<0>();
        pin_registers(wg.rmem_S);
    }
    while (wg.item.n_steps != kEndOfItems) {
        wg.clear_gradients();
        mbarrier_wait(wg.smem.v_full(wg.slot(wg.items, Kernel::v_stages)),
                      wg.phase(wg.items, Kernel::v_stages));
        wg.clear_unseen_keys();
        wg.find_ahead();
        const int n_steps = wg.item.n_steps;
#pragma unroll 1
        for (int i = 0; i < n_steps; ++i) {
            if (Kernel::trimmed && wg.sees_nothing()) {
                backward_step<true>(wg, i);
            } else {
                backward_step<false>(wg, i);
            }
        }
        wg.store_dv();
        wg.store_dk();
        wg.take_item();
    }
    if constexpr (Kernel::late_dq) {
        if (wg.blocks > 0) {  // dQ of the very last block
            float rmem_dQ[wg.kDqRegisters];
            const uint32_t read = wg.blocks - 1;
            mbarrier_wait(wg.smem.ds_full(wg.slot(read, 2)), wg.phase(read, 2));
            const uint32_t word =
                wg.uniform_word(wg.slot(read, 2) | wg.slot(wg.items - 1, Kernel::k_stages) << 8);
            wg.products.issue_dq(rmem_dQ, word & 255, word >> 8);
            wgmma_wait<0>();
            pin_registers(rmem_dQ);
            send_dq(wg, rmem_dQ);
        }
    }
    // Barriers end as they began.
    if constexpr (Kernel::stages_dq) {
        named_barrier_sync(named_barrier::kStageFree + wg.warpgroup, Kernel::warpgroup_threads + kWarpSize);
    }
    if (Kernel::cfg.ping_pong && wg.warpgroup == 0) wg.await_turn();
}

}  // namespace flash::hopper
