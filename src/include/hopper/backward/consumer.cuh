// What a consumer warpgroup holds: gradients of its 64 keys, the scores in hand, and how many query blocks
// and items it has passed, from which slots and phases follow. mainloop.cuh puts its moves in order.
#pragma once

#include "common/backward/ahead_of_columns.cuh"
#include "common/kept_weights.cuh"
#include "hopper/backward/dq_parts.cuh"
#include "hopper/backward/epilogue.cuh"
#include "hopper/backward/kept_sums.cuh"
#include "hopper/backward/modified_tile.cuh"
#include "hopper/backward/probabilities.cuh"
#include "hopper/backward/products.cuh"
#include "hopper/backward/unseen_rows.cuh"

namespace flash::hopper {

template <typename Kernel>
struct BackwardConsumer : Probabilities<Kernel, BackwardConsumer<Kernel>>,
                          ModifiedTile<Kernel, BackwardConsumer<Kernel>>,
                          DqParts<Kernel, BackwardConsumer<Kernel>> {
    static constexpr int B_r = Kernel::B_r, B_c = Kernel::B_c;
    static constexpr int kQStages = Kernel::q_stages, kKStages = Kernel::k_stages,
                         kVStages = Kernel::v_stages;
    static constexpr int kPairs = B_r / 8;  // pairs of neighbouring queries, of one key row of a thread
    using Known = AheadOfColumns<typename Kernel::Mod, kPairs>;
    // Whether P is made as by a kernel without functions, of scores that these have hidden or replaced.
    static constexpr bool kUsualP =
        !Kernel::has_mod || Kernel::hides_scores || (Kernel::replaces_scores && !Kernel::drops);
    // Where functions replace 64 x 128 scores, nothing has registers beside them.
    static constexpr bool kLseAhead =
        Kernel::cfg.lse_ahead && kUsualP && !(Kernel::replaces_scores && B_r > kWarpgroupRows);

    using KeptWeights = std::conditional_t<Kernel::drops, KeptOfKeys<B_r / 16>, AllKept>;

    const BackwardKernelArgs &args;
    const BackwardSharedMemory<Kernel> smem;
    const BackwardProducts<Kernel> products;
    const int warpgroup, lane, warp;

    float rmem_dK[Kernel::d_head / 2];    // (64, d)
    float rmem_dV[Kernel::d_head_v / 2];  // (64, d_v)
    float rmem_S[B_r / 2];  // (64, B_r): S^T, then P^T; with softcap tanh, then what dS is made of
    float2 rmem_lse[kLseAhead ? kPairs : 1];
    [[no_unique_address]] KeptWeights stays;  // of the block in hand
    [[no_unique_address]] Known known;        // of the next scores, before they are there
    uint32_t blocks = 0, items = 0;           // passed
    BackwardItem item;
    int q_block;
    int query_head;  // of the block in hand; kept with a mod alone
    TileKind kind;   // what the mask of the user's leaves of it, where it is told
    int dq_tile;     // of the block in hand: its first of 16 rows
    // Of the block whose dQ leaves next, with late_dq the one before: the warp's tile, or with keeps_dq more.
    int noted_dq_tile = kNoTile;
    KeptPart kept{};

    FLASH_DEVICE BackwardConsumer(const BackwardKernelArgs &kernel_args,
                                  const BackwardSharedMemory<Kernel> &shared, int index)
        : args(kernel_args),
          smem(shared),
          products(shared, index),
          warpgroup(index),
          lane(threadIdx.x % kWarpSize),
          warp(threadIdx.x % Kernel::warpgroup_threads / kWarpSize) {}

    // ---------------------------------------------------------------- slots
    // x, of which the compiler now knows that it is the same in the whole warp: without the zero, which it
    // cannot know, it would prove the shuffle needless.
    FLASH_DEVICE uint32_t uniform_word(uint32_t x) const {
        return __shfl_sync(kAllLanes, x + static_cast<uint32_t>(args.zero), 0);
    }
    FLASH_DEVICE static uint32_t slot(uint32_t passed, int stages) { return passed % stages; }
    FLASH_DEVICE static uint32_t phase(uint32_t passed, int stages) { return passed / stages & 1; }

    FLASH_DEVICE void release(uint32_t barrier) const {
        if (arrives_for_warp(lane)) mbarrier_arrive(barrier);
    }

    // ---------------------------------------------------------------- turns
    FLASH_DEVICE void await_turn() const {
        if (Kernel::cfg.ping_pong) {
            named_barrier_sync(named_barrier::kTurn + warpgroup, 2 * Kernel::warpgroup_threads);
        }
    }
    FLASH_DEVICE void pass_turn() const {
        if (Kernel::cfg.ping_pong) {
            named_barrier_arrive(named_barrier::kTurn + (warpgroup ^ 1), 2 * Kernel::warpgroup_threads);
        }
    }

    // ---------------------------------------------------------------- items
    FLASH_DEVICE void await_item() {
        mbarrier_wait(smem.k_full(slot(items, kKStages)), phase(items, kKStages));
    }

    // The item in hand, of K's slot: bounds of loops must be known to be uniform.
    FLASH_DEVICE void take_item() {
        item = read_item(smem.item(slot(items, kKStages)));
        item.n_steps = uniform_word(item.n_steps);
        q_block = item.first_block;
        if constexpr (Kernel::has_mod) query_head = item.head * args.group;
        dq_tile = first_dq_tile<Kernel>(args, item) + item.first_block * Kernel::dq_row_tiles;
    }

    FLASH_DEVICE void go_to_next_block() {
        ++q_block;
        dq_tile += Kernel::dq_row_tiles;
        if (q_block == item.end_block) {
            q_block = item.first_block;
            if constexpr (Kernel::has_mod) ++query_head;
            dq_tile += args.dq_tiles - item.visited_blocks() * Kernel::dq_row_tiles;
        }
    }

    FLASH_DEVICE int first_key_of_warpgroup() const {
        return item.tile * B_c + (Kernel::split ? 0 : warpgroup * kWarpgroupRows);
    }

    // Of the thread's two, the upper one.
    FLASH_DEVICE int first_key() const { return first_key_of_warpgroup() + warp * 16 + lane / 4; }

    FLASH_DEVICE void clear_gradients() {
#pragma unroll
        for (int i = 0; i < Kernel::d_head / 2; ++i) rmem_dK[i] = 0.f;
#pragma unroll
        for (int i = 0; i < Kernel::d_head_v / 2; ++i) rmem_dV[i] = 0.f;
    }

    FLASH_DEVICE void store_dv() const {
        const float scale = Kernel::p_unit * weight_scale<typename Kernel::Mod>(args);
        store_gradient<Kernel, Kernel::d_head_v>(rmem_dV, scale, args.dv, args.dv_strides, args, item,
                                                 first_key(), lane, args.d_head_v);
    }
    FLASH_DEVICE void store_dk() const {
        store_gradient<Kernel, Kernel::d_head>(rmem_dK, args.softmax_scale * Kernel::p_unit, args.dk,
                                               args.dk_strides, args, item, first_key(), lane, args.d_head);
    }

    // ---------------------------------------------------------------- rows that take no part
    static constexpr bool kMasks = Kernel::traits.causal || Kernel::traits.window;
    // Whether scores of what is no query, or no key, become -inf. Under a mask P becomes 0, where the LSE of
    // a query that does not see the key may be NaN.
    static constexpr bool kMasksScores = Kernel::replaces_scores && !kMasks;

    // Of Q and dO of the block in hand, whose scores are there.
    FLASH_DEVICE void clear_unseen_queries() const {
        if constexpr (kMasks) {
            Range seeing = args.visible<Kernel::traits>(item.seq_len_q, item.seq_len_k).seeing_rows();
            if (seeing.end == item.seq_len_q)
                seeing.end = q_block * B_r + B_r;  // rows past the end are zeros
            const uint32_t q_slot = slot(blocks, kQStages);
            const RowsOfTile of_tile{q_block * B_r, 0, B_r};
            if (!has_unused(seeing, of_tile)) return;
            clear_unused<B_r, Kernel::d_head>(smem.q(q_slot), seeing, of_tile);
            clear_unused<B_r, Kernel::d_head_v>(smem.dout(q_slot), seeing, of_tile);
            show_cleared(named_barrier::kWarpgroup + warpgroup);
        }
    }

    // Of the warpgroup's rows of K and V. Only windows leave keys that nobody sees.
    FLASH_DEVICE void clear_unseen_keys() const {
        if constexpr (Kernel::traits.window) {
            Range seen = args.visible<Kernel::traits>(item.seq_len_q, item.seq_len_k).seen_keys();
            if (seen.end == item.seq_len_k) seen.end = item.tile * B_c + B_c;
            const RowsOfTile of_tile{item.tile * B_c, warpgroup * kWarpgroupRows, kWarpgroupRows};
            if (!has_unused(seen, of_tile)) return;
            clear_unused<B_c, Kernel::d_head>(smem.k(slot(items, kKStages)), seen, of_tile);
            clear_unused<B_c, Kernel::d_head_v>(smem.v(slot(items, kVStages)), seen, of_tile);
            show_cleared(named_barrier::kWarpgroup + warpgroup);
        }
    }

    // ---------------------------------------------------------------- probabilities
    // Of the block whose scores are computed.
    FLASH_DEVICE void read_ahead() {
        if constexpr (Kernel::hides_scores) {
            // Through a shuffle: branches by it are the whole warp's.
            const uint32_t address = smem.kind(slot(blocks, kQStages), Kernel::split ? 0 : warpgroup);
            kind = static_cast<TileKind>(uniform_word(load_shared_int(address)));
        }
        if constexpr (kLseAhead) {
            const uint32_t address = smem.lse(slot(blocks, kQStages)) + (lane & 3) * 8;
#pragma unroll
            for (int j = 0; j < kPairs; ++j) rmem_lse[j] = load_shared_float2(address + j * 32);
        }
    }
};

}  // namespace flash::hopper
