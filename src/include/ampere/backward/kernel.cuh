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
#include "ampere/backward/query_gradient_share.cuh"
#include "ampere/backward/score_role.cuh"

namespace flash::ampere {

template <typename Kernel>
FLASH_DEVICE void run_score_role(const BlockWork<Kernel> &work) {
    constexpr int stages = Kernel::stages;
    constexpr int kAhead = max_of(1, stages - 1);  // tiles that copies are ahead of their use
    const auto &barriers = work.barriers;
    ScoreRole<Kernel> role(work);
    typename ScoreRole<Kernel>::dVSums dV;
    dV.clear();
    const ScoreExchange<Kernel> exchange(work.smem, work.group, work.half, work.lane);
    QueryGradientShare<Kernel, DQWarps::SCORE> dQ(work);

    QueryWalk at = work.walk();
    RingPlace<stages> stage;
    uint32_t P_parity = 0;
    work.copy_K();
    const auto copy_next = [&] {  // dO of the tile that is due next
        const QueryWalk next = at.template ahead<kAhead>();
        const RingPlace<stages> place = stage.template ahead<kAhead>();
        if (next.ended()) return;
        mbarrier_wait(barriers.empty_dO(place.slot), place.parity ^ 1);
        work.copy_dO(next, place.slot);
    };
    if (!at.ended()) work.copy_dO(at, 0);
    if (stages > 2 && !at.template ahead<1>().ended()) work.copy_dO(at.template ahead<1>(), 1);
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
        typename ScoreRole<Kernel>::Fragments P;
        mbarrier_wait(barriers.full_Q(stage.slot), stage.parity);
        role.make_scores(S, stage.slot);
        dQ.tell(at.template back<2>(), visit - 2);
        if constexpr (stages > 1) copy_next();
        mbarrier_wait(barriers.empty_P(work.group), P_parity ^ 1);
        role.make_probabilities(P, S, exchange, at, stage.slot);
        barriers.arrive(barriers.full_P(work.group), work.lane);
        barriers.arrive(barriers.empty_Q(stage.slot), work.lane);
        mbarrier_wait(barriers.full_dO(stage.slot), stage.parity);
        if constexpr (Kernel::paired_warps) mbarrier_wait(barriers.full_P(work.group), P_parity);
        role.add_to_dV(dV, exchange, P, stage.slot);
        if constexpr (Kernel::paired_warps) barriers.arrive(barriers.empty_P(work.group), work.lane);
        barriers.arrive(barriers.empty_dO(stage.slot), work.lane);
        if constexpr (stages == 1) copy_next();
        if (visit > 0) dQ.make(at.template back<1>(), visit - 1);
        P_parity ^= 1;
        stage.advance();
        at.advance();
    }
    if (visit > 0) {
        dQ.tell(at.template back<2>(), visit - 2);
        dQ.make(at.template back<1>(), visit - 1);
        dQ.tell(at.template back<1>(), visit - 1);
    }
    store_key_gradients<Kernel, Kernel::warp_d_v>(
        dV, work, work.args.dV, work.args.dV_strides, work.args.d_head_v, work.half * Kernel::warp_d_v,
        unshifted(Kernel::dtype) * weight_scale<typename Kernel::Mod>(work.args));
}

template <typename Kernel>
FLASH_DEVICE void run_gradient_role(const BlockWork<Kernel> &work) {
    constexpr int stages = Kernel::stages;
    constexpr int kAhead = max_of(1, stages - 1);  // tiles that copies are ahead of their use
    const auto &barriers = work.barriers;
    GradientRole<Kernel> role(work);
    typename GradientRole<Kernel>::dKSums dK;
    dK.clear();
    const ScoreExchange<Kernel> exchange(work.smem, work.group, work.half, work.lane);
    QueryGradientShare<Kernel, DQWarps::GRADIENT> dQ(work);

    QueryWalk at = work.walk();
    RingPlace<stages> stage;
    RingPlace<Kernel::ds_slots> ds;
    uint32_t P_parity = 0;
    const auto copy_next = [&] {  // Q of the tile that is due next
        const QueryWalk next = at.template ahead<kAhead>();
        const RingPlace<stages> place = stage.template ahead<kAhead>();
        if (next.ended()) return;
        mbarrier_wait(barriers.empty_Q(place.slot), place.parity ^ 1);
        work.copy_Q(next, place.slot);
    };
    work.copy_V();
    wait_for_prerequisites();  // the pre-pass, which makes the LSE and delta that come with Q
    if (!at.ended()) work.copy_Q(at, 0);
    if (stages > 2 && !at.template ahead<1>().ended()) work.copy_Q(at.template ahead<1>(), 1);
    if (!at.ended()) {
        mbarrier_wait(barriers.full_V(), 0);
        if constexpr (Kernel::holds_V) {
#pragma unroll
            for (int step = 0; step < Kernel::d_v_tiles; ++step) role.load_V(role.held_V.steps[step], step);
        }
        // Nobody touches K before dQ; that is far behind full_K for warps that see it complete here.
        if constexpr (Kernel::gradient_warps_make_dQ) mbarrier_wait(barriers.full_K(), 0);
    }

    int visit = 0;
#pragma unroll 1
    for (; !at.ended(); ++visit) {
        typename GradientRole<Kernel>::dPSums dP;
        typename GradientRole<Kernel>::Fragments dS;
        mbarrier_wait(barriers.full_dO(stage.slot), stage.parity);
        role.make_dP(dP, stage.slot);
        barriers.arrive(barriers.empty_dO(stage.slot), work.lane);
        role.drop(dP, at);
        dQ.tell(at.template back<1>(), visit - 1);
        if constexpr (stages > 1) copy_next();
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
        if constexpr (stages == 1) copy_next();
        dQ.make(at, visit);
        P_parity ^= 1;
        ds.advance();
        stage.advance();
        at.advance();
    }
    dQ.tell(at.template back<1>(), visit - 1);
    store_key_gradients<Kernel, Kernel::warp_d>(dK, work, work.args.dK, work.args.dK_strides,
                                                work.args.d_head, work.half * Kernel::warp_d,
                                                work.args.softmax_scale * unshifted(Kernel::dtype));
}

template <typename Kernel>
FLASH_DEVICE void compute_key_gradients(const BackwardKernelArgs &args) {
    constexpr BackwardTraits TRAITS = Kernel::traits;
    extern __shared__ char smem_begin[];
    const uint32_t smem = smem_address(smem_begin);
    const BackwardPlace place = find_backward_place<Kernel>(args, blockIdx.x);
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

template <FlashBackwardKernelConfig CFG, BackwardTraits TRAITS>
__global__ void __launch_bounds__(StaticBackwardKernelConfig<CFG, TRAITS>::n_threads,
                                  StaticBackwardKernelConfig<CFG, TRAITS>::min_blocks_per_sm)
    flash_backward_kernel(const __grid_constant__ BackwardKernelArgs args) {
    compute_key_gradients<StaticBackwardKernelConfig<CFG, TRAITS>>(args);
}

// The same with functions of the user's.
template <FlashBackwardKernelConfig CFG, BackwardTraits TRAITS, typename MOD>
__global__ void __launch_bounds__(StaticBackwardKernelConfig<CFG, TRAITS, MOD>::n_threads,
                                  StaticBackwardKernelConfig<CFG, TRAITS, MOD>::min_blocks_per_sm)
    flash_backward_mod_kernel(const __grid_constant__ BackwardArgs<MOD> args) {
    compute_key_gradients<StaticBackwardKernelConfig<CFG, TRAITS, MOD>>(args);
}

}  // namespace flash::ampere
