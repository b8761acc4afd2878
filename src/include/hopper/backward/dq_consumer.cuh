// dQ's own kernel, a consumer warpgroup: 64 queries, over the keys they see.
//
//     S = Q K^T,  dP = dO V^T,  dS = P (dP - delta),  dQ += dS K        P = 2^(S c - LSE)
//
// Rows are queries here, so that a thread needs the LSE and the delta of two rows only. It computes delta
// itself, from dO in shared memory and O, and writes it down for the kernel of dK and dV.
//
//     dP(j) | exponentials of S(j) | dS(j) | dQ(j), S(j + 1)
#pragma once

#include "common/quad.cuh"
#include "common/softcap.cuh"
#include "common/softmax_scale.cuh"
#include "hopper/backward/dq_modified_tile.cuh"
#include "hopper/backward/dq_producer.cuh"
#include "hopper/backward/epilogue.cuh"
#include "hopper/backward/unseen_rows.cuh"
#include "hopper/mask_tile.cuh"
#include "hopper/wgmma.cuh"

namespace flash::hopper {

template <typename Kernel>
struct DqConsumer : DqModifiedTile<Kernel, DqConsumer<Kernel>> {
    static constexpr int B_r = Kernel::B_r, B_c = Kernel::B_c;
    static constexpr int d_head = Kernel::d_head, d_head_v = Kernel::d_head_v;
    static constexpr uint32_t kSameTile = 16;  // a distance that is not used

    const BackwardKernelArgs &args;
    const DqSharedMemory<Kernel> smem;
    const int warpgroup, lane, warp;
    // Lower words of descriptors of slot 0: of rows as they are, and reduction first (`_t`).
    const uint32_t q_word, do_word, k_word, v_word, k_t_word;

    float rmem_dQ[d_head / 2];  // (64, d)
    float rmem_S[B_c / 2];      // (64, B_c): S, then P; with softcap tanh
    float lse[2], delta[2];     // of the thread's rows; the LSE in powers of 2
    BackwardItem item;
    uint32_t items = 0, tiles = 0;  // passed
    int tile;                       // of keys, in hand
    TileKind kind;                  // what a mask of the user's leaves of it, where it is told

    FLASH_DEVICE DqConsumer(const BackwardKernelArgs &kernel_args, const DqSharedMemory<Kernel> &shared,
                            int index)
        : args(kernel_args),
          smem(shared),
          warpgroup(index),
          lane(threadIdx.x % kWarpSize),
          warp(threadIdx.x % Kernel::warpgroup_threads / kWarpSize),
          q_word(descriptor_lower_word(shared.q(0) + index * kWarpgroupRows * kPanelRowBytes, kSameTile)),
          do_word(descriptor_lower_word(shared.dout(0) + index * kWarpgroupRows * kPanelRowBytes, kSameTile)),
          k_word(descriptor_lower_word(shared.k(0), kSameTile)),
          v_word(descriptor_lower_word(shared.v(0), kSameTile)),
          k_t_word(descriptor_lower_word(shared.k(0), B_c * kPanelRowBytes)) {}

    FLASH_DEVICE static uint32_t slot(uint32_t passed, int stages) { return passed % stages; }
    FLASH_DEVICE static uint32_t phase(uint32_t passed, int stages) { return passed / stages & 1; }

    FLASH_DEVICE void release(uint32_t barrier) const {
        if (arrives_for_warp(lane)) mbarrier_arrive(barrier);
    }
    FLASH_DEVICE uint32_t uniform_word(uint32_t x) const {
        return __shfl_sync(kAllLanes, x + static_cast<uint32_t>(args.zero), 0);
    }

    // ---------------------------------------------------------------- items
    // False: there is none.
    FLASH_DEVICE bool fetch_item() {
        mbarrier_wait(smem.q_full(slot(items, Kernel::q_stages)), phase(items, Kernel::q_stages));
        item = read_item(smem.item(slot(items, Kernel::q_stages)));
        item.n_steps = uniform_word(item.n_steps);
        tile = item.first_block;
        return item.n_steps != kEndOfItems;
    }

    FLASH_DEVICE int row(int r) const {
        return item.tile * B_r + warpgroup * kWarpgroupRows + warp * 16 + lane / 4 + 8 * r;
    }

    // An LSE of -inf is of a row that sees no key: +inf makes its P 0, as that of rows past the end.
    FLASH_DEVICE void read_rows() {
        const SequenceRows rows = item_queries<Kernel>(args, item);
        const int64_t numbers = item_lse_begin<Kernel>(args, item, item.head);
        const int chunks = (Kernel::traits.padded_head ? args.d_head_v : d_head_v) / kChunkElements;
        const uint32_t smem_dO = smem.dout(slot(items, Kernel::q_stages));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool exists = row(r) < item.seq_len_q;
            const uint16_t *gmem_O =
                static_cast<const uint16_t *>(args.o) + rows.batch * args.o_strides.batch +
                (int64_t{rows.first_row} + row(r)) * args.o_strides.seq + item.head * args.o_strides.head;
            float sum = 0.f;
            if (exists) {
#pragma unroll 4
                for (int chunk = lane & 3; chunk < chunks; chunk += 4) {
                    const Chunk o = load_global(gmem_O + chunk * kChunkElements);
                    const Chunk dout = load_shared(smem_dO + chunk_offset(B_r, row(r) % B_r, chunk));
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float2 a = unpack<Kernel::dtype>(o.reg[i]),
                                     b = unpack<Kernel::dtype>(dout.reg[i]);
                        sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
                    }
                }
            }
            sum = quad_sum(sum);
            const float natural = exists ? args.lse[numbers + row(r)] : -INFINITY;
            if (natural == -INFINITY) sum = 0.f;  // O is 0; nothing of dO counts, not even NaN
            if (exists && args.dlse != nullptr) sum -= args.dlse[numbers + row(r)];
            if (exists && (lane & 3) == 0) args.written_delta[numbers + row(r)] = sum;
            lse[r] = natural == -INFINITY ? INFINITY : natural * kLog2e;
            delta[r] = sum;
        }
    }

    // ---------------------------------------------------------------- products
    FLASH_DEVICE void issue_scores() {
        const uint32_t word =
            uniform_word(slot(items, Kernel::q_stages) | slot(tiles, Kernel::k_stages) << 8);
        issue_rows<d_head>(rmem_S, q_word + (word & 255) * descriptor_step(Kernel::q_bytes),
                           k_word + (word >> 8) * descriptor_step(Kernel::k_bytes));
    }

    template <int depth>
    static FLASH_DEVICE void issue_rows(float (&rmem)[B_c / 2], uint32_t a_word, uint32_t b_word) {
        const uint64_t a = make_descriptor(a_word), b = make_descriptor(b_word);
        pin_registers(rmem);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < depth / kMmaDepth; ++step) {
            Wgmma<Kernel::dtype, B_c>::multiply_shared(rmem, a + column_step(step, B_r),
                                                       b + column_step(step, B_c), step > 0);
        }
        wgmma_commit();
    }

    FLASH_DEVICE void issue_dq(uint32_t (&rmem_dS)[B_c / 4], uint32_t k_slot) {
        const uint64_t b = make_descriptor(k_t_word + k_slot * descriptor_step(Kernel::k_bytes));
        pin_registers(rmem_dQ);
        pin_registers(rmem_dS);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < B_c / kMmaDepth; ++step) {
            Wgmma<Kernel::dtype, d_head>::template multiply_registers<true>(rmem_dQ, rmem_dS + 4 * step,
                                                                            b + row_step(step), 1);
        }
        wgmma_commit();
    }

    // ---------------------------------------------------------------- one step
    FLASH_DEVICE VisibleRows<Kernel::traits> visible() const {
        return args.visible<Kernel::traits>(item.seq_len_q, item.seq_len_k);
    }

    // Whether some of the warpgroup's queries does not see some key of the tile in hand.
    FLASH_DEVICE bool needs_mask() const {
        const int first_row = item.tile * B_r + warpgroup * kWarpgroupRows;
        return !visible().sees_all(first_row, first_row + kWarpgroupRows - 1, {tile * B_c, tile * B_c + B_c});
    }

    // S -> P; with softcap -> tanh, of which score_gradients makes P.
    FLASH_DEVICE void probabilities() {
        if constexpr (Kernel::has_mod && !Kernel::hides_scores && !Kernel::replaces_scores) {
            this->modified_probabilities();
        } else if constexpr (Kernel::traits.softcap) {
            cap_any_scores(rmem_S, args.score_factor, args.exponent_factor);
        } else {
#pragma unroll
            for (int i = 0; i < B_c / 2; ++i) {
                rmem_S[i] = exp2_approx(fmaf(rmem_S[i], args.exponent_factor, -lse[i / 2 % 2]));
            }
        }
    }

    // dS from P, or tanh, and dP; with softcap the gradient of the score before the cap. Where a mask hides
    // it, it is 0 whatever the rows of K, V and dO hold.
    FLASH_DEVICE void score_gradients(uint32_t (&rmem_dS)[B_c / 4], float (&rmem_dP)[B_c / 2]) {
        this->drop(rmem_dP);
        if (!needs_mask()) {
#pragma unroll
            for (int i = 0; i < B_c / 4; ++i) {
                rmem_dS[i] =
                    pack<Kernel::dtype>(score_gradient(rmem_dP, 2 * i), score_gradient(rmem_dP, 2 * i + 1));
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < B_c / 2; ++i) rmem_dP[i] = score_gradient(rmem_dP, i);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Range keys = visible().keys_of(row(r));
            keep_columns<B_c, true>(rmem_dP, r, lane, keys.end - tile * B_c, keys.begin - tile * B_c, 0.f);
        }
#pragma unroll
        for (int i = 0; i < B_c / 4; ++i) {
            rmem_dS[i] = pack<Kernel::dtype>(rmem_dP[2 * i], rmem_dP[2 * i + 1]);
        }
    }

    FLASH_DEVICE float score_gradient(const float (&rmem_dP)[B_c / 2], int i) const {
        float p = rmem_S[i];
        if constexpr (Kernel::traits.softcap) {
            p = exp2_approx(fmaf(rmem_S[i], args.exponent_factor, -lse[i / 2 % 2])) *
                (1.f - rmem_S[i] * rmem_S[i]);
        }
        return p * (rmem_dP[i] - delta[i / 2 % 2]);
    }

    // Of K, keys that no query of the block sees: first or last ones of a tile.
    FLASH_DEVICE void clear_unseen_keys() const {
        if constexpr (Kernel::traits.window) {
            const int first = item.tile * B_r, last = min(first + B_r, item.seq_len_q) - 1;
            Range seen{visible().keys_of(first).begin, visible().keys_of(last).end};
            if (seen.end == item.seq_len_k) seen.end = tile * B_c + B_c;  // rows past the end are zeros
            const RowsOfTile of_tile{tile * B_c, 0, B_c};
            if (!has_unused(seen, of_tile)) return;
            clear_unused<B_c, d_head>(smem.k(slot(tiles, Kernel::k_stages)), seen, of_tile);
            show_cleared(kWarpgroupBarrier + warpgroup);
        }
    }

    template <bool kLast>
    FLASH_DEVICE void step() {
        const uint32_t q_slot = slot(items, Kernel::q_stages), k_slot = slot(tiles, Kernel::k_stages);
        const uint32_t v_slot = slot(tiles, Kernel::v_stages);
        const uint32_t word = uniform_word(q_slot | k_slot << 8 | v_slot << 16);
        float rmem_dP[B_c / 2];
        if constexpr (Kernel::hides_scores) this->hide_scores();
        if constexpr (Kernel::replaces_scores) this->replace_scores();
        mbarrier_wait(smem.v_full(v_slot), phase(tiles, Kernel::v_stages));
        await_turn();
        issue_rows<d_head_v>(rmem_dP, do_word + (word & 255) * descriptor_step(Kernel::do_bytes),
                             v_word + (word >> 16) * descriptor_step(Kernel::v_bytes));
        pass_turn();
        probabilities();
        wgmma_wait<0>();
        pin_registers(rmem_dP);
        release(smem.v_empty(v_slot));
        uint32_t rmem_dS[B_c / 4];
        score_gradients(rmem_dS, rmem_dP);
        clear_unseen_keys();
        await_turn();
        issue_dq(rmem_dS, word >> 8 & 255);
        ++tiles;
        ++tile;
        if constexpr (kLast) {
            pass_turn();
            wgmma_wait<0>();
        } else {
            mbarrier_wait(smem.k_full(slot(tiles, Kernel::k_stages)), phase(tiles, Kernel::k_stages));
            issue_scores();
            pass_turn();
            this->read_kind();
            wgmma_wait<1>();  // dQ is done
        }
        pin_registers(rmem_dQ);
        pin_registers(rmem_dS);
        release(smem.k_empty(k_slot));
        if constexpr (!kLast) {
            wgmma_wait<0>();
            pin_registers(rmem_S);
        }
    }

    FLASH_DEVICE void run_item() {
#pragma unroll
        for (int i = 0; i < d_head / 2; ++i) rmem_dQ[i] = 0.f;
        mbarrier_wait(smem.k_full(slot(tiles, Kernel::k_stages)), phase(tiles, Kernel::k_stages));
        await_turn();
        issue_scores();
        pass_turn();
        this->read_kind();
        read_rows();
        wgmma_wait<0>();
        pin_registers(rmem_S);
        const int n_steps = item.n_steps;
#pragma unroll 1
        for (int i = 1; i < n_steps; ++i) step<false>();
        step<true>();
        release(smem.q_empty(slot(items, Kernel::q_stages)));
        ++items;
        store_dq();
    }

    // ---------------------------------------------------------------- the end of an item
    // As dK and dV are stored (epilogue.cuh).
    FLASH_DEVICE void store_dq() const {
        if (args.dq == nullptr) return;
        const SequenceRows rows = item_queries<Kernel>(args, item);
        const int quad_lane = lane & 3;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int64_t begin = rows.batch * args.dq_strides.batch +
                                  (int64_t{rows.first_row} + row(r)) * args.dq_strides.seq +
                                  item.head * args.dq_strides.head;
            const bool exists = row(r) < rows.n_rows;
            if constexpr (Kernel::traits.float_query_gradients) {
                store_float_row<Kernel, d_head>(rmem_dQ, r, args.softmax_scale,
                                                static_cast<float *>(args.dq) + begin, quad_lane, exists,
                                                args.d_head);
            } else {
                store_gradient_row<Kernel, d_head>(rmem_dQ, r, args.softmax_scale,
                                                   static_cast<uint16_t *>(args.dq) + begin + quad_lane * 8,
                                                   quad_lane, exists, args.d_head);
            }
        }
    }

    // ---------------------------------------------------------------- turns
    FLASH_DEVICE void await_turn() const {
        if (Kernel::cfg.ping_pong) named_barrier_sync(kDqTurn + warpgroup, 2 * Kernel::warpgroup_threads);
    }
    FLASH_DEVICE void pass_turn() const {
        if (Kernel::cfg.ping_pong) {
            named_barrier_arrive(kDqTurn + (warpgroup ^ 1), 2 * Kernel::warpgroup_threads);
        }
    }

  private:
    // Named barriers, + consumer warpgroup.
    static constexpr int kDqTurn = 1, kWarpgroupBarrier = 3;
};

template <typename Kernel>
FLASH_DEVICE void run_dq_consumer(DqConsumer<Kernel> &wg) {
    if (wg.warpgroup == 1) wg.pass_turn();  // the first turn is warpgroup 0's
    while (wg.fetch_item()) wg.run_item();
    if (wg.warpgroup == 0) wg.await_turn();  // barriers end as they began
}

}  // namespace flash::hopper
