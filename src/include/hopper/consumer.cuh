// What a consumer warpgroup holds, and its moves: fragments, softmax state, ring positions, turns.
// consumer.cuh puts the moves in order.
#pragma once

#include "hopper/epilogue.cuh"
#include "hopper/mask.cuh"
#include "hopper/products.cuh"
#include "hopper/recompute.cuh"
#include "hopper/softmax.cuh"

namespace flash::hopper {

template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
struct Consumer {
    using Static = StaticForwardKernelConfig<CFG, TRAITS>;
    static constexpr int B_r = Static::B_r, B_c = Static::B_c, d_v = Static::d_head_v;
    static constexpr bool kLagged = CFG.softmax_reference == SoftmaxReference::LAGGED;

    const ForwardKernelArgs &args;
    const SharedMemory<CFG, TRAITS> smem;
    const Products<CFG, TRAITS> products;
    const int warpgroup;  // 0 ... n_consumers - 1
    const int lane, warp;

    float rmem_S[B_c / 2];     // (64, B_c) scores, then weights
    uint32_t rmem_P[B_c / 4];  // (64, B_c) weights, 16 bit
    float rmem_O[d_v / 2];     // (64, d_v)
    OnlineSoftmax<B_c> softmax{};
    Descriptors tiles;
    RingPosition<Static::kKvStages> kv{0};  // K's tile; V's has the same slot, one tile later
    RingPosition<Static::kQStages> q{0};
    WorkItem item;
    int kv_block;  // tile in hand

    FLASH_DEVICE Consumer(const ForwardKernelArgs &kernel_args, const SharedMemory<CFG, TRAITS> &shared,
                          int index)
        : args(kernel_args),
          smem(shared),
          products(shared, index),
          warpgroup(index),
          lane(threadIdx.x & 31),
          warp((threadIdx.x & (kWarpgroupThreads - 1)) >> 5) {}

    // ---------------------------------------------------------------- softmax of a tile
    FLASH_DEVICE void first_softmax() {
        if (TRAITS.causal || (kv_block + 1) * B_c > args.work.seq_len_k) mask_tile();
        softmax.template exact_step<true, true>(rmem_S, args.scale_log2);
    }

    template <bool kMasked>
    FLASH_DEVICE void tile_softmax() {
        if constexpr (kLagged && !kMasked) {
            softmax.lagged_step(rmem_S, args.scale_log2);
        } else {
            softmax.template exact_step<false, kMasked>(rmem_S, args.scale_log2);
        }
    }

    // O follows the step's change of reference. No wgmma is in flight.
    template <bool kMasked>
    FLASH_DEVICE void settle_softmax() {
        if constexpr (kLagged && !kMasked) {
            if (!softmax.warp_outgrew(kToleratedGrowth)) return;
            if (softmax.warp_outgrew(kRescalableGrowth)) {
                softmax.undo_lagged_step(rmem_S);
                recompute_scores<CFG.dtype, B_r, B_c, Static::d_head>(
                    rmem_S, smem.q(q.slot()), smem.k(kv.slot()), warpgroup * kWarpgroupRows + warp * 16,
                    lane);
                softmax.template exact_step<false, false>(rmem_S, args.scale_log2);
            } else {
                softmax.adopt_growth(rmem_S, args.scale_log2, args.inv_scale_log2);
            }
        } else if constexpr (CFG.softmax_reference == SoftmaxReference::EXACT_SKIP_RESCALE) {
            if (!__any_sync(kFullWarp, fminf(softmax.rescale[0], softmax.rescale[1]) != 1.f)) return;
        }
        scale_rows(rmem_O, softmax.rescale);
    }

    FLASH_DEVICE void mask_tile() {
        const int row0 = item.q_block * B_r + warpgroup * kWarpgroupRows + warp * 16 + (lane >> 2);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int last_visible =
                row0 + 8 * r + args.work.seq_len_k - args.work.seq_len_q;  // bottom-right
            const int n_visible =
                TRAITS.causal ? min(args.work.seq_len_k, last_visible + 1) : args.work.seq_len_k;
            keep_columns_below<B_c>(rmem_S, r, lane, n_visible - kv_block * B_c);
        }
    }

    FLASH_DEVICE void round_weights() {
#pragma unroll
        for (int i = 0; i < B_c / 4; ++i) rmem_P[i] = pack<CFG.dtype>(rmem_S[2 * i], rmem_S[2 * i + 1]);
    }

    FLASH_DEVICE void zero_output() {
#pragma unroll
        for (int i = 0; i < d_v / 2; ++i) rmem_O[i] = 0.f;
    }

    FLASH_DEVICE RowState row_state() const {
        return {{softmax.sum[0], softmax.sum[1]}, {softmax.reference[0], softmax.reference[1]}};
    }

    FLASH_DEVICE void finish(const WorkItem &ended, const RowState &state, uint32_t q_slot) {
        // Until O has been staged the slot still holds the item: no register has to carry it through the
        // loops.
        const WorkItem done = CFG.direct_store ? ended : read_item(q_slot);
        finish_item<CFG, TRAITS>(rmem_O, state, args, smem, done, q_slot, warpgroup, warp, lane);
    }

    // ---------------------------------------------------------------- which tiles
    // Masks end at this tile: the first row of the warpgroup sees all columns of those before it, and one
    // of this one. So every row has met a key before the steady loop, and its reference is finite.
    FLASH_DEVICE int last_masked_block() const {
        const int first_row = item.q_block * B_r + warpgroup * kWarpgroupRows;
        return max(0, (first_row + args.work.seq_len_k - args.work.seq_len_q) / B_c);
    }

    FLASH_DEVICE int first_kv_block() const {
        int n_blocks = item.n_kv_blocks;
        if (Static::kMaxSkippedTiles > 0) {
            const int visible = item.q_block * B_r + (warpgroup + 1) * kWarpgroupRows + args.work.seq_len_k -
                                args.work.seq_len_q;
            n_blocks = min(n_blocks, max((visible + B_c - 1) / B_c, 1));
            n_blocks = max(n_blocks, item.n_kv_blocks - Static::kMaxSkippedTiles);
        }
        return n_blocks - 1;
    }

    // Passes the tiles before the first one on unused, with all the turns and releases of those that are
    // used.
    FLASH_DEVICE void skip_leading_tiles() {
        if constexpr (Static::kMaxSkippedTiles > 0) {
#pragma unroll 1
            for (int skipped = item.n_kv_blocks - 1; skipped > kv_block; --skipped) {
                mbarrier_wait(smem.k_full(kv.slot()), kv.phase());
                await_turn();
                pass_turn();
                release(smem.k_empty(kv.slot()));
                mbarrier_wait(smem.v_full(kv.slot()), kv.phase());
                release(smem.v_empty(kv.slot()));
                kv.advance();
            }
        }
    }

    FLASH_DEVICE void fetch_item() {
        mbarrier_wait(smem.q_full(q.slot()), q.phase());  // Q and its item are there
        item = read_item(q.slot());
        // Loop bounds must be known to be uniform, or the loops' slots are not (see products.cuh).
        item.q_block = __shfl_sync(kFullWarp, item.q_block, 0);
        item.n_kv_blocks = __shfl_sync(kFullWarp, item.n_kv_blocks, 0);
    }

    FLASH_DEVICE WorkItem read_item(uint32_t slot) const {
        const int4 stored = load_shared_int4(smem.item(slot));
        return {stored.x, stored.y, stored.z, stored.w};
    }

    // ---------------------------------------------------------------- barriers
    // The opaque zero is the sign of a sum of powers of two (the hardware's NaN is positive too).
    FLASH_DEVICE void use_slots(uint32_t k, uint32_t v) {
        tiles = products.descriptors(
            make_uniform(k, v, q.slot(), __float_as_uint(softmax.sum[0]) >> 31));
    }

    // This warp no longer needs what the barrier guards.
    FLASH_DEVICE void release(uint32_t barrier) {
        if (lane == 0) mbarrier_arrive(barrier);
    }

    // Turns: named barrier 1 + i is warpgroup i's, joined by its 128 threads and the 128 that pass to it.
    FLASH_DEVICE void await_turn() {
        if (CFG.ping_pong) named_barrier_sync(1 + warpgroup, 2 * kWarpgroupThreads);
    }
    FLASH_DEVICE void pass_turn_to(int other) { named_barrier_arrive(1 + other, 2 * kWarpgroupThreads); }
    FLASH_DEVICE void pass_turn() {
        if (CFG.ping_pong) pass_turn_to((warpgroup + 1) % Static::n_consumers);
    }

    FLASH_DEVICE void sync_warpgroup() { named_barrier_sync(8 + warpgroup, kWarpgroupThreads); }

    // S is there; P V goes on, unless both are waited for here (drained).
    FLASH_DEVICE void await_scores(uint32_t v_slot) {
        if constexpr (CFG.drained) {
            wgmma_wait<0>();
            pin_output();
            release(smem.v_empty(v_slot));
        } else {
            wgmma_wait<1>();
        }
        pin_registers(rmem_S);
    }

    // P V is done. ptxas moves this wait up in front of the exponentials, unless a branch that depends on
    // them stands before it: forced_overlap adds one, which no finite sum takes.
    FLASH_DEVICE void await_pv(uint32_t v_slot) {
        if (CFG.drained) return;  // in await_scores
        if (CFG.forced_overlap && __any_sync(kFullWarp, fmaxf(softmax.sum[0], softmax.sum[1]) > 1e36f)) {
            store_shared(smem.sink(), 1);
        }
        wgmma_wait<0>();
        pin_output();
        release(smem.v_empty(v_slot));
    }

    FLASH_DEVICE void pin_output() {
        pin_registers(rmem_O);
        pin_registers(rmem_P);
    }
};

}  // namespace flash::hopper
