// The steps of the two consumer warpgroups with split_gradients, which share 64 keys: dK and dV of large
// heads do not fit the registers of one.
//
//     warpgroup 0   exponentials of S(i) | P(i) -> shared | dV(i), S(i + 1)
//     warpgroup 1                          dS(i) from dP(i) and P(i) | dK(i), dP(i + 1)
//
// Both have the same elements of a tile in the same registers: what a thread leaves in shared memory its
// counterpart reads.
#pragma once

#include "hopper/backward/mainloop.cuh"

namespace flash::hopper {

// Where pair j of the thread's elements, four of them, lies in slot `slot` of P.
template <typename Kernel>
FLASH_DEVICE uint32_t exchanged_pair(const BackwardConsumer<Kernel> &wg, uint32_t slot, int j) {
    constexpr int kBytes = Kernel::cfg.float_p ? 16 : 8;
    const int thread = threadIdx.x % Kernel::warpgroup_threads;
    return wg.smem.p(slot) + (j * Kernel::warpgroup_threads + thread) * kBytes;
}

// ---------------------------------------------------------------- S and dV
// P as dS needs it.
template <typename Kernel>
FLASH_DEVICE void send_probabilities(BackwardConsumer<Kernel> &wg) {
    const uint32_t slot = wg.slot(wg.blocks, 2);
    mbarrier_wait(wg.smem.p_empty(slot), wg.phase(wg.blocks, 2) ^ 1);
#pragma unroll
    for (int j = 0; j < wg.kPairs; ++j) {
        const float *p = wg.rmem_S + 4 * j;
        if constexpr (Kernel::cfg.float_p) {
            store_shared(exchanged_pair(wg, slot, j), make_int4(__float_as_int(p[0]), __float_as_int(p[1]),
                                                                __float_as_int(p[2]), __float_as_int(p[3])));
        } else {
            store_shared_pair(exchanged_pair(wg, slot, j), pack<Kernel::handed>(p[0], p[1]),
                              pack<Kernel::handed>(p[2], p[3]));
        }
    }
    __syncwarp();
    wg.release(wg.smem.p_full(slot));
}

template <typename Kernel>
FLASH_DEVICE int split_score_step(BackwardConsumer<Kernel> &wg, int i) {
    constexpr int kQ = Kernel::q_stages;
    const bool last = i + 1 == wg.item.n_steps;
    const uint32_t q_slot = wg.slot(wg.blocks, kQ);
    const uint32_t uniform_q = wg.uniform_word(q_slot);
    if (last) wg.release(wg.smem.k_empty(wg.slot(wg.items, Kernel::k_stages)));  // all scores are there
    uint32_t rmem_P[Kernel::B_r / 4], none[Kernel::B_r / 4];
    if constexpr (Kernel::signs_dropped) wg.draw();
    wg.modify_scores();
    wg.probabilities(rmem_P, none);
    send_probabilities(wg);
    mbarrier_wait(wg.smem.do_full(q_slot), wg.phase(wg.blocks, kQ));
    wg.clear_unseen_queries();
    wg.products.issue_dv(wg.rmem_dV, rmem_P, uniform_q);
    wg.go_to_next_block();
    ++wg.blocks;
    int next_steps = kEndOfItems;
    if (last) next_steps = await_next_item(wg);
    if (!last || next_steps != kEndOfItems) {
        mbarrier_wait(wg.smem.q_full(wg.slot(wg.blocks, kQ)), wg.phase(wg.blocks, kQ));
    }
    issue_scores(wg);
    wgmma_wait<1>();  // dV is done
    pin_registers(wg.rmem_dV);
    wg.release(wg.smem.q_empty(q_slot));
    wg.read_ahead();
    if (last) {  // what follows is of another item
        wg.known.forget();
    } else {
        wg.find_ahead();
    }
    wgmma_wait<0>();
    pin_registers(wg.rmem_S);
    return next_steps;
}

template <typename Kernel>
FLASH_DEVICE void run_split_scores(BackwardConsumer<Kernel> &wg) {
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
        wg.find_ahead();
        const int n_steps = wg.item.n_steps;
#pragma unroll 1
        for (int i = 0; i < n_steps; ++i) split_score_step(wg, i);
        wg.store_dv();
        wg.take_item();
    }
}

// ---------------------------------------------------------------- dP and dK
// The thread's pair j of P.
template <typename Kernel>
FLASH_DEVICE float2 received_probabilities(const BackwardConsumer<Kernel> &wg, uint32_t slot, int i) {
    const uint32_t address = exchanged_pair(wg, slot, i / 4);
    if constexpr (Kernel::cfg.float_p) {
        return load_shared_float2(address + i / 2 % 2 * 8);
    } else {
        return unpack<Kernel::handed>(load_shared_int(address + i / 2 % 2 * 4));
    }
}

// dP of the block at wg.blocks, of the item at wg.items; as issue_scores.
template <typename Kernel>
FLASH_DEVICE void issue_split_dp(BackwardConsumer<Kernel> &wg) {
    const uint32_t word =
        wg.uniform_word(wg.slot(wg.blocks, Kernel::q_stages) | wg.slot(wg.items, Kernel::v_stages) << 8);
    wg.products.issue_dp(wg.rmem_S, word >> 8, word & 255);
}

template <typename Kernel>
FLASH_DEVICE void await_split_dp(BackwardConsumer<Kernel> &wg, bool first) {
    constexpr int kQ = Kernel::q_stages, kV = Kernel::v_stages;
    if (first) mbarrier_wait(wg.smem.v_full(wg.slot(wg.items, kV)), wg.phase(wg.items, kV));
    mbarrier_wait(wg.smem.do_full(wg.slot(wg.blocks, kQ)), wg.phase(wg.blocks, kQ));
}

template <typename Kernel>
FLASH_DEVICE void split_gradient_step(BackwardConsumer<Kernel> &wg, int i) {
    constexpr int kQ = Kernel::q_stages;
    const bool last = i + 1 == wg.item.n_steps;
    const uint32_t q_slot = wg.slot(wg.blocks, kQ), p_slot = wg.slot(wg.blocks, 2);
    const uint32_t uniform_q = wg.uniform_word(q_slot);
    if (last) wg.release(wg.smem.v_empty(wg.slot(wg.items, Kernel::v_stages)));  // all of dP is there
    mbarrier_wait(wg.smem.q_full(q_slot), wg.phase(wg.blocks, kQ));
    mbarrier_wait(wg.smem.p_full(p_slot), wg.phase(wg.blocks, 2));
    uint32_t rmem_dS[Kernel::B_r / 4];
    if constexpr (!Kernel::signs_dropped) wg.draw();
    const auto received = [&](int e) { return received_probabilities(wg, p_slot, e); };
    if (wg.kMasks && wg.needs_mask()) {
        wg.template make_score_gradients<true>(rmem_dS, wg.rmem_S, received);
        wg.clear_unseen_queries();
    } else {
        wg.template make_score_gradients<false>(rmem_dS, wg.rmem_S, received);
    }
    __syncwarp();
    wg.release(wg.smem.p_empty(p_slot));
    wg.products.issue_dk(wg.rmem_dK, rmem_dS, uniform_q);
    wg.go_to_next_block();
    ++wg.blocks;
    int next_steps = kEndOfItems;
    if (last) next_steps = await_next_item(wg);
    if (!last || next_steps != kEndOfItems) await_split_dp(wg, last);
    issue_split_dp(wg);
    wgmma_wait<1>();  // dK is done
    pin_registers(wg.rmem_dK);
    wg.release(wg.smem.q_empty(q_slot));
    wgmma_wait<0>();
    pin_registers(wg.rmem_S);
}

// Its item has been read: the scores alone hold K's slot from now on.
template <typename Kernel>
FLASH_DEVICE void take_split_item(BackwardConsumer<Kernel> &wg) {
    wg.take_item();
    __syncwarp();
    if (wg.item.n_steps != kEndOfItems) wg.release(wg.smem.k_empty(wg.slot(wg.items, Kernel::k_stages)));
}

template <typename Kernel>
FLASH_DEVICE void run_split_gradients(BackwardConsumer<Kernel> &wg) {
    wg.await_item();
    take_split_item(wg);
    if (wg.item.n_steps != kEndOfItems) {
        await_split_dp(wg, true);
        issue_split_dp(wg);
        wgmma_wait<0>();
        pin_registers(wg.rmem_S);
    }
    while (wg.item.n_steps != kEndOfItems) {
        wg.clear_gradients();
        const int n_steps = wg.item.n_steps;
#pragma unroll 1
        for (int i = 0; i < n_steps; ++i) split_gradient_step(wg, i);
        wg.store_dk();
        take_split_item(wg);
    }
}

}  // namespace flash::hopper
