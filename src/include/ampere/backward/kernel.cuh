// FlashAttention backward: dK and dV of a block of keys in registers, dQ added to float32 sums tile by tile.
//
// A thread block owns B_c keys of one head of K and V. For each query head of the group, and for each tile of
// B_r queries that see some of the keys:
//
//     score warps                                     gradient warps
//     S^T = K Q^T                                     dP^T = V dO^T
//     P^T = 2^(S^T - LSE), hidden scores: 0
//     P^T ────────────────────────────────────────►   dS^T = P^T * (dP^T - delta)
//     dV += P^T dO                                    dS^T ──► shared memory
//     dQ of the tile before, where they make it       dK += dS^T Q
//                                                     dQ = dS K, where they make it
//
// so that one half's exponentials run under the other half's products, and each fragment of an operand is
// read for twice as many rows as if every warp did all five products. dQ is added to float32 sums
// (dq_sums.cuh); a second kernel rounds them (convert_dq.cuh). LSE, in powers of 2, and delta are made before
// (prepare.cuh).
#pragma once

#include "ampere/backward/block_work.cuh"
#include "ampere/backward/epilogue.cuh"
#include "ampere/backward/gradient_role.cuh"
#include "ampere/backward/query_gradient.cuh"
#include "ampere/backward/score_role.cuh"

namespace flash::ampere {

// A role's part in dQ.
template <typename Kernel, DQWarps kRole>
struct QueryGradientShare {
    static constexpr DQWarps who = Kernel::cfg.dq_warps;
    static constexpr bool takes_part =
        Kernel::makes_dQ && (who == kRole || who == DQWarps::BOTH || who == DQWarps::ALTERNATE);

    const BlockWork<Kernel> &work;
    QueryGradient<Kernel> product;
    RingPlace<Kernel::ds_slots> place;

    FLASH_DEVICE explicit QueryGradientShare(const BlockWork<Kernel> &work)
        : work(work),
          product(work.smem,
                  work.warp + (Kernel::both_roles && kRole == DQWarps::GRADIENT ? Kernel::role_warps : 0),
                  work.lane) {}

    // dQ of visit number `visit`, at `at`; visits come in order.
    FLASH_DEVICE void make(const QueryWalk &at, int visit) {
        if constexpr (takes_part) {
            constexpr int own_parity = kRole == DQWarps::GRADIENT;
            if (who != DQWarps::ALTERNATE || visit % 2 == own_parity) {
                typename QueryGradient<Kernel>::Part dQ;
                dQ.clear();
                mbarrier_wait(work.barriers.full_dS(place.slot), place.parity);
                product.multiply_into(dQ, place.slot);
                work.barriers.arrive(work.barriers.empty_dS(place.slot), work.lane);
                add(dQ, at);
            }
            place.advance();
        }
    }

  private:
    FLASH_DEVICE void add(typename QueryGradient<Kernel>::Part &dQ, const QueryWalk &at) const {
        if (work.args.dQ == nullptr) return;
        const typename QueryGradient<Kernel>::Sums sums{work.tile_sums(at), work.row_tiles_of(at),
                                                        work.sum_columns()};
        if constexpr (Kernel::cfg.dq_sum != DQSum::ORDERED) {
            product.add(dQ, sums, work.lane);
        } else {
            const auto [number, last] = work.turn_number(at);
            int *turn = work.turn(at, product.part);
            if (number > 0) wait_for_turn(turn, number, work.lane);
            if (last) {
                if (number > 0) product.take(dQ, sums, work.lane);
                const int first = at.tile * Kernel::B_r;
                const Range rows{0, work.mask.seq_len_q - first};
                const Range seeing{work.seeing_rows.begin - first, work.seeing_rows.end - first};
                const int64_t row_bytes = work.args.dQ_strides.seq * kElementBytes;
                const char *row_0 =
                    work.row_0(work.args.dQ, work.args.dQ_strides, work.place.q_seq, work.query_head(at));
                product.store(dQ, const_cast<char *>(row_0) + first * row_bytes, row_bytes, rows, seeing,
                              work.args.d_head, work.args.softmax_scale, work.lane);
                return;
            }
            if (number > 0) {
                product.add(dQ, sums, work.lane);
            } else {
                product.begin(dQ, sums, work.lane);
            }
            end_turn(turn, work.lane);
        }
    }
};

template <typename Kernel>
FLASH_DEVICE void run_score_role(const BlockWork<Kernel> &work) {
    constexpr int stages = Kernel::stages;
    const auto &barriers = work.barriers;
    ScoreRole<Kernel> role(work);
    typename ScoreRole<Kernel>::dVSums dV;
    dV.clear();
    const ScoreExchange<Kernel> exchange(work.smem, work.group, work.half, work.lane);
    QueryGradientShare<Kernel, DQWarps::SCORE> dQ(work);

    QueryWalk at = work.walk(), ahead = at, before = at;
    RingPlace<stages> stage, ahead_stage;
    uint32_t P_parity = 0;
    work.copy_K();
    const auto copy_next = [&](bool wait) {  // dO of the next tile
        if (ahead.ended()) return;
        if (wait) mbarrier_wait(barriers.empty_dO(ahead_stage.slot), ahead_stage.parity ^ 1);
        work.copy_dO(ahead, ahead_stage.slot);
        ahead.advance();
        ahead_stage.advance();
    };
    for (int i = 0; i < max_of(1, stages - 1); ++i) copy_next(false);
    wait_for_prerequisites();  // the pre-pass; K and dO are not of it
    if (!at.ended()) {
        mbarrier_wait(barriers.full_K(), 0);
        if constexpr (Kernel::holds_K) {
#pragma unroll
            for (int step = 0; step < Kernel::d_tiles; ++step) role.load_K(role.held_K.steps[step], step);
        }
    }

    int visit = 0;
#pragma unroll 1
    for (; !at.ended(); ++visit) {
        typename ScoreRole<Kernel>::Scores S;
        typename ScoreRole<Kernel>::Fragments P, slopes;
        mbarrier_wait(barriers.full_Q(stage.slot), stage.parity);
        role.make_scores(S, stage.slot);
        if constexpr (stages > 1) copy_next(true);
        role.make_probabilities(P, slopes, S, at, stage.slot);
        barriers.arrive(barriers.empty_Q(stage.slot), work.lane);
        mbarrier_wait(barriers.empty_P(work.group), P_parity ^ 1);
        exchange.store_P(P, slopes);
        barriers.arrive(barriers.full_P(work.group), work.lane);
        mbarrier_wait(barriers.full_dO(stage.slot), stage.parity);
        if constexpr (Kernel::paired_warps) mbarrier_wait(barriers.full_P(work.group), P_parity);
        role.add_to_dV(dV, exchange, P, stage.slot);
        if constexpr (Kernel::paired_warps) barriers.arrive(barriers.empty_P(work.group), work.lane);
        barriers.arrive(barriers.empty_dO(stage.slot), work.lane);
        if constexpr (stages == 1) copy_next(true);
        if (visit > 0) dQ.make(before, visit - 1);
        P_parity ^= 1;
        stage.advance();
        before = at;
        at.advance();
    }
    if (visit > 0) dQ.make(before, visit - 1);
    store_key_gradients<Kernel, Kernel::warp_d_v>(dV, work, work.args.dV, work.args.dV_strides,
                                                  work.args.d_head_v, work.half * Kernel::warp_d_v, 1.0f);
}

template <typename Kernel>
FLASH_DEVICE void run_gradient_role(const BlockWork<Kernel> &work) {
    constexpr int stages = Kernel::stages;
    const auto &barriers = work.barriers;
    GradientRole<Kernel> role(work);
    typename GradientRole<Kernel>::dKSums dK;
    dK.clear();
    const ScoreExchange<Kernel> exchange(work.smem, work.group, work.half, work.lane);
    QueryGradientShare<Kernel, DQWarps::GRADIENT> dQ(work);

    QueryWalk at = work.walk(), ahead = at;
    RingPlace<stages> stage, ahead_stage;
    RingPlace<Kernel::ds_slots> ds;
    uint32_t P_parity = 0;
    const auto copy_next = [&](bool wait) {  // Q of the next tile
        if (ahead.ended()) return;
        if (wait) mbarrier_wait(barriers.empty_Q(ahead_stage.slot), ahead_stage.parity ^ 1);
        work.copy_Q(ahead, ahead_stage.slot);
        ahead.advance();
        ahead_stage.advance();
    };
    work.copy_V();
    wait_for_prerequisites();  // the pre-pass, which makes the LSE and delta that come with Q
    for (int i = 0; i < max_of(1, stages - 1); ++i) copy_next(false);
    if (!at.ended()) {
        mbarrier_wait(barriers.full_V(), 0);
        if constexpr (Kernel::holds_V) {
#pragma unroll
            for (int step = 0; step < Kernel::d_v_tiles; ++step) role.load_V(role.held_V.steps[step], step);
        }
        // Nobody touches K before dQ; that is far behind full_K for warps that see it complete here.
        if constexpr (Kernel::gradient_warps_make_dQ) mbarrier_wait(barriers.full_K(), 0);
    }

#pragma unroll 1
    for (int visit = 0; !at.ended(); ++visit) {
        typename GradientRole<Kernel>::dPSums dP;
        typename GradientRole<Kernel>::Fragments dS;
        mbarrier_wait(barriers.full_dO(stage.slot), stage.parity);
        role.make_dP(dP, stage.slot);
        barriers.arrive(barriers.empty_dO(stage.slot), work.lane);
        if constexpr (stages > 1) copy_next(true);
        mbarrier_wait(barriers.full_Q(stage.slot), stage.parity);
        mbarrier_wait(barriers.full_P(work.group), P_parity);
        role.make_dS(dS, dP, exchange, stage.slot);
        barriers.arrive(barriers.empty_P(work.group), work.lane);
        if constexpr (Kernel::makes_dQ || Kernel::paired_warps) {
            // ALTERNATE, BOTH, …: whoever reads a slot has read it.
            mbarrier_wait(barriers.empty_dS(ds.slot), ds.parity ^ 1);
            exchange.store_dS(dS, ds.slot);
            barriers.arrive(barriers.full_dS(ds.slot), work.lane);
        }
        if constexpr (Kernel::paired_warps) mbarrier_wait(barriers.full_dS(ds.slot), ds.parity);
        role.add_to_dK(dK, dS, exchange, ds.slot, stage.slot);
        if constexpr (Kernel::paired_warps) barriers.arrive(barriers.empty_dS(ds.slot), work.lane);
        barriers.arrive(barriers.empty_Q(stage.slot), work.lane);
        if constexpr (stages == 1) copy_next(true);
        dQ.make(at, visit);
        P_parity ^= 1;
        ds.advance();
        stage.advance();
        at.advance();
    }
    store_key_gradients<Kernel, Kernel::warp_d>(dK, work, work.args.dK, work.args.dK_strides,
                                                work.args.d_head, work.half * Kernel::warp_d,
                                                work.args.softmax_scale);
}

template <FlashBackwardKernelConfig CFG, BackwardTraits TRAITS>
__global__ void __launch_bounds__(StaticBackwardKernelConfig<CFG, TRAITS>::n_threads,
                                  StaticBackwardKernelConfig<CFG, TRAITS>::min_blocks_per_sm)
    flash_backward_kernel(const __grid_constant__ BackwardKernelArgs args) {
    using Kernel = StaticBackwardKernelConfig<CFG, TRAITS>;
    extern __shared__ char smem_begin[];
    const uint32_t smem = smem_address(smem_begin);
    const BackwardPlace place = find_backward_place<TRAITS>(args, blockIdx.x);
    if constexpr (TRAITS.varlen) {
        wait_for_prerequisites();
        clear_keys_of_none(args);
    }
    if (place.k_block * Kernel::B_c >= place.owned_keys) return;

    const bool scores = threadIdx.x < Kernel::role_threads;
    const BlockWork<Kernel> work(args, place, smem, threadIdx.x % Kernel::role_threads);
    if (threadIdx.x == 0) work.barriers.initialize();
    __syncthreads();
    if (uniform(scores)) {
        run_score_role(work);
    } else {
        run_gradient_role(work);
    }
}

}  // namespace flash::ampere
