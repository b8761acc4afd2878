// What a consumer warpgroup holds, fragments, softmax state and ring positions, and its moves. mainloop.cuh
// puts the moves in order.
#pragma once

#include "common/chunks.cuh"
#include "hopper/forward/begun_scores.cuh"
#include "hopper/forward/capped_softmax.cuh"
#include "hopper/forward/epilogue.cuh"
#include "hopper/forward/kept_rows.cuh"
#include "hopper/forward/products.cuh"
#include "hopper/forward/recompute.cuh"
#include "hopper/forward/score_mods.cuh"
#include "hopper/forward/softmax.cuh"
#include "hopper/forward/streamed_tiles.cuh"
#include "hopper/forward/tile_range.cuh"
#include "hopper/forward/tile_slot.cuh"
#include "hopper/forward/turns.cuh"
#include "hopper/mask_tile.cuh"

namespace flash::hopper {

// Of a kernel without a mod nothing.
struct NothingKnown {};
template <typename Kernel>
struct KnownAheadOf {
    using Type = NothingKnown;
};
template <typename Kernel>
    requires(Kernel::has_mod)
struct KnownAheadOf<Kernel> {
    using Type = typename ScoreMods<Kernel>::Known;
};

// Of a softmax by row, and of chunks of keys.
template <typename Kernel>
struct ChunkState {};
template <typename Kernel>
    requires(Kernel::by_row)
struct ChunkState<Kernel> {
    float sum_before[2];  // of the last lagged step
    int end_of_loops;     // of the chunk in hand
};

template <typename Kernel>
struct Consumer : TileRange<Kernel, Consumer<Kernel>>,
                  Turns<Kernel, Consumer<Kernel>>,
                  BegunScores<Kernel, Consumer<Kernel>>,
                  KeptRows<Kernel, Consumer<Kernel>> {
    static constexpr int B_r = Kernel::B_r, B_c = Kernel::B_c, d_v = Kernel::d_head_v;
    static constexpr bool kByRow = Kernel::by_row;
    static constexpr bool kLagged = kByRow || Kernel::cfg.softmax_reference == SoftmaxReference::LAGGED;

    const KernelArgs<typename Kernel::Mod> &args;
    const SharedMemory<Kernel> smem;
    const Products<Kernel> products;
    const int warpgroup;  // 0 ... n_consumers - 1
    const int lane, warp;

    uint32_t rmem_Q[Kernel::q_registers];  // the last columns of Q, 16 bit, as A operands
    float rmem_S[B_c / 2];                 // (64, B_c) scores, then P
    uint32_t rmem_P[B_c / 4];              // (64, B_c) P, 16 bit
    float rmem_O[d_v / 2];                 // (64, d_v)
    OnlineSoftmax<B_c, Kernel::mod_changes_scores> softmax{};
    [[no_unique_address]] ChunkState<Kernel> chunks;
    CapForm cap_form;  // softcap
    Descriptors tiles;
    TilePosition<Kernel::k_stages, Kernel::v_stages> kv;
    RingPosition<Kernel::q_stages> q{0};
    ItemOf<Kernel> item;
    int kv_block;                                                     // tile in hand
    TileWords tile_words;                                             // of a mod that hides keys
    bool needs_exact_step;                                            // likewise: see look_back
    [[no_unique_address]] typename KnownAheadOf<Kernel>::Type known;  // of the scores of the tile in hand

    FLASH_DEVICE Consumer(const KernelArgs<typename Kernel::Mod> &kernel_args,
                          const SharedMemory<Kernel> &shared, int index)
        : args(kernel_args),
          smem(shared),
          products(shared, index),
          warpgroup(index),
          lane(threadIdx.x & 31),
          warp((threadIdx.x & (kWarpgroupThreads - 1)) >> 5) {}

    // ---------------------------------------------------------------- softmax of a tile
    FLASH_DEVICE void first_softmax() {
        if constexpr (Kernel::traits.softcap && !kByRow) {
            cap_form = args.long_cap_series.end > 0.f ? CapForm::SHORT_SERIES : CapForm::ANY;
        }
        cap_scores();
        if constexpr (Kernel::has_mod) apply_mod<true>(true);
        if (Kernel::masks_diagonal || (kv_block + 1) * B_c > this->seq_len_k()) mask_tile();
        softmax.template exact_step<true>(rmem_S, args.exponent_factor, args.lowest, this->score_start());
    }

    // capped_steps.cuh has that of lagged, capped scores.
    template <bool kMasked>
    FLASH_DEVICE void tile_softmax() {
        if constexpr (kByRow) return row_softmax<kMasked>();
        cap_scores();
        if constexpr (Kernel::has_mod) apply_mod<false>(true);
        if (kMasked) mask_tile();
        if (kLagged && !kMasked && !(Kernel::mod_hides_keys && needs_exact_step)) {
            softmax.lagged_step(rmem_S, args.exponent_factor, this->score_start());
        } else {
            softmax.template exact_step<false>(rmem_S, args.exponent_factor, args.lowest,
                                               this->score_start());
        }
    }

    // A function of the user's may hide all that a query sees of a tile, and the reference of a query that
    // has met no key says nothing of the next one's score: whether the tile in hand takes an exact step.
    // Asked while its scores are computed.
    FLASH_DEVICE void look_back() {
        if constexpr (Kernel::mod_hides_keys) {
            const bool met_none = fminf(softmax.reference[0], softmax.reference[1]) <= args.lowest;
            needs_exact_step = __any_sync(kAllLanes, met_none || tile_words.kind != TileKind::FULL);
        }
    }

    // It hides all of the tile from the warpgroup.
    FLASH_DEVICE bool sees_nothing() const {
        return Kernel::mod_hides_keys && tile_words.kind == TileKind::EMPTY;
    }

    // Of the first tile of a chunk behind another.
    FLASH_DEVICE void chunk_softmax() {
        cap_scores();
        if (this->needs_mask(kv_block)) mask_tile();
        softmax.template exact_step<true>(rmem_S, args.exponent_factor, args.lowest);
    }

    template <bool kMasked>
    FLASH_DEVICE void row_softmax() {
        cap_scores();
        if constexpr (kMasked) {
            mask_tile();
            softmax.row_step(rmem_S, args.exponent_factor, args.inv_exponent_factor, args.lowest);
        } else {
            chunks.sum_before[0] = softmax.sum[0];
            chunks.sum_before[1] = softmax.sum[1];
            softmax.lagged_step(rmem_S, args.exponent_factor);
        }
    }

    // O follows the step's change of reference. No wgmma is in flight.
    template <bool kMasked>
    FLASH_DEVICE void settle_softmax() {
        if constexpr (kByRow) {
            return settle_row_softmax<kMasked>();
        } else if constexpr (kLagged && !kMasked) {
            if (Kernel::mod_hides_keys && needs_exact_step) return scale_rows(rmem_O, softmax.rescale);
            if (!softmax.warp_outgrew(kToleratedGrowth)) return;
            if (softmax.warp_outgrew(kRescalableGrowth)) {
                undo_lagged_step();
                this->begin_scores();
                recompute_scores<Kernel>(rmem_S, smem.q(q.slot()), smem.k(kv.k_slot()),
                                         warpgroup * kWarpgroupRows + warp * 16, lane);
                cap_scores();
                if constexpr (Kernel::has_mod) apply_mod<true, false>(false);  // what was copied is released
                softmax.template exact_step<false>(rmem_S, args.exponent_factor, args.lowest,
                                                   this->score_start());
            } else {
                softmax.adopt_growth(rmem_S, args.exponent_factor, args.inv_exponent_factor);
            }
        } else if constexpr (Kernel::cfg.softmax_reference == SoftmaxReference::EXACT_SKIP_RESCALE) {
            if (!__any_sync(kAllLanes, fminf(softmax.rescale[0], softmax.rescale[1]) != 1.f)) return;
        }
        scale_rows(rmem_O, softmax.rescale);
    }

    template <bool kMasked>
    FLASH_DEVICE void settle_row_softmax() {
        if constexpr (!kMasked) {
            if (!softmax.warp_outgrew(kToleratedGrowthByRow)) return;
            if (softmax.warp_outgrew(kRescalableGrowth)) {
                softmax.sum[0] = chunks.sum_before[0];
                softmax.sum[1] = chunks.sum_before[1];
                this->begin_scores();
                // Chunks leave no registers for addresses that are found before the loop.
                const int own_lane = Kernel::chunk_tiles > 0 ? computed_here(lane) : lane;
                recompute_scores<Kernel>(rmem_S, smem.q(q.slot()), smem.k(kv.k_slot()),
                                         warpgroup * kWarpgroupRows + warp * 16, own_lane);
                cap_scores();
                softmax.row_step(rmem_S, args.exponent_factor, args.inv_exponent_factor, args.lowest);
            } else {
                softmax.adopt_growth_of_rows(rmem_S, args.exponent_factor, args.inv_exponent_factor);
            }
        }
        scale_rows(rmem_O, softmax.rescale);
    }

    FLASH_DEVICE void undo_lagged_step() {
        // NaN looks like an unusable step, where no step can be; others are known to the whole warp.
        if (Kernel::traits.softcap && cap_form != CapForm::ANY && softmax.growth[0] == kUnusableStep) {
            cap_form = CapForm::LONG_SERIES;  // unless cap_scores finds that it does not hold either
        } else {
            softmax.undo_lagged_step(rmem_S);
        }
    }

    // Scores become tanh(score_factor S); softcap is a part of exponent_factor.
    FLASH_DEVICE void cap_scores() {
        if constexpr (Kernel::traits.softcap && kByRow) {
            cap_any_scores(rmem_S, args.score_factor, args.exponent_factor);  // by the score alone
        } else if constexpr (Kernel::traits.softcap) {
            if (!flash::cap_scores<kLongTerms>(rmem_S, args.score_factor, args.exponent_factor))
                cap_form = CapForm::ANY;
        }
    }

    // What functions of the user's do to the scores of the tile in hand. Where the thread's elements are is
    // found out anew: else what follows from it for each column is held from tile to tile.
    // kFinds: nobody has called find_ahead for the tile. kCopied: what is streamed is in shared memory, until
    // it has been read once. `hides`: some of the tile may be hidden.
    template <bool kFinds, bool kCopied = Kernel::copies_streamed>
    FLASH_DEVICE void apply_mod(bool hides) {
        constexpr bool kAhead = kCopied || !(Kernel::copies_streamed || ScoreMods<Kernel>::kOneByOne);
        if constexpr (kAhead && (kFinds || !ScoreMods<Kernel>::kFoundEarly)) find_known<kCopied>();
        const int thread_lane = computed_here(lane);
        const int row = mod_row(thread_lane);
        constexpr bool kReadsTile = kCopied && ScoreMods<Kernel>::Known::kInGroups;
        auto tile = streamed_tile();
        if constexpr (kReadsTile) tile.await();
        const auto find_group = [&](int square) {
            if constexpr (kReadsTile) {
                tile.read_group(known, warp, square, thread_lane);
            } else if constexpr (kAhead && !kCopied) {
                known.find_group(args.mod.captured, item.batch, item.head, row,
                                 kv_block * B_c + square * kMmaN, thread_lane);
            }
        };
        mods().template apply<kAhead>(rmem_S, known, args.score_factor, row, kv_block * B_c, thread_lane,
                                      Kernel::mod_hides_keys && hides ? tile_words.kind : TileKind::FULL,
                                      find_group);
        if constexpr (kReadsTile) release_streamed(tile);
    }
    // What is known of the tile's scores, while they are computed.
    static constexpr int kPlaceOfKnown = 1 << 16;  // of divide_schedule, behind those of ScoreMods
    FLASH_DEVICE void find_ahead() {
        if constexpr (Kernel::has_mod) {
            if constexpr (ScoreMods<Kernel>::kFoundEarly) {
                find_known<Kernel::copies_streamed>();
                divide_schedule(this->seq_len_q(), kPlaceOfKnown);  // else ptxas puts it behind the wait
            }
        }
    }
    template <bool kCopied>
    FLASH_DEVICE void find_known() {
        const int thread_lane = computed_here(lane);
        const int row = mod_row(thread_lane);
        if constexpr (kCopied) {
            known.find_diagonals(args.mod.captured, item.batch, item.head, row, kv_block * B_c, thread_lane);
            if constexpr (!ScoreMods<Kernel>::Known::kInGroups) {
                auto tile = streamed_tile();
                tile.await();
                tile.read_group(known, warp, 0, thread_lane);
                release_streamed(tile);
            }
            return;
        }
        if (ScoreMods<Kernel>::kFoundEarly && kv_block > 0) {
            known.prefetch(args.mod.captured, item.batch, item.head, row - (thread_lane >> 2),
                           (kv_block - 1) * B_c, thread_lane);
        }
        known.find(args.mod.captured, item.batch, item.head, row, kv_block * B_c, thread_lane);
    }
    FLASH_DEVICE StreamedTile<Kernel> streamed_tile() const { return {smem, warpgroup, kv.passed}; }
    FLASH_DEVICE void release_streamed(const StreamedTile<Kernel> &tile) {
        tile.await_reads(smem);
        this->release(tile.empty);
    }
    FLASH_DEVICE ScoreMods<Kernel> mods() const {
        return {args.mod.captured, item.batch, item.head, this->seq_len_q()};
    }
    FLASH_DEVICE int mod_row(int thread_lane) const {
        return this->first_row() + warp * 16 + accumulator(thread_lane, 0).row;
    }

    // Of P, of which the sums have been taken.
    FLASH_DEVICE void drop_weights() {
        if constexpr (Kernel::drops) {
            const int thread_lane = computed_here(lane);
            const auto kept = mods().kept_weights(mod_row(thread_lane), kv_block * B_c, thread_lane);
#pragma unroll
            for (int i = 0; i < B_c / 2; ++i) {
                if (!kept.has(i / 4, i % 4)) rmem_S[i] = 0.f;
            }
        }
    }

    FLASH_DEVICE void mask_tile() {
        const int row0 = this->first_row() + warp * 16 + accumulator(lane, 0).row;
        const int first_column = kv_block * B_c;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = row0 + 8 * r;
            if constexpr (Kernel::traits.planned && Kernel::masks_diagonal) {
                row =
                    this->query_of(warpgroup * kWarpgroupRows + warp * 16 + accumulator(lane, 0).row + 8 * r);
            }
            if constexpr (Kernel::traits.window) {
                keep_columns<B_c, true>(rmem_S, r, lane, this->mask().visible_end(row) - first_column,
                                        this->mask().visible_begin(row) - first_column);
            } else {
                const int last_visible = row + this->seq_len_k() - this->seq_len_q();  // bottom-right
                const int n_visible =
                    Kernel::traits.causal ? min(this->seq_len_k(), last_visible + 1) : this->seq_len_k();
                keep_columns<B_c>(rmem_S, r, lane, n_visible - first_column);
            }
        }
    }

    FLASH_DEVICE void round_probabilities() {
        drop_weights();
#pragma unroll
        for (int i = 0; i < B_c / 4; ++i) rmem_P[i] = pack<Kernel::dtype>(rmem_S[2 * i], rmem_S[2 * i + 1]);
    }

    FLASH_DEVICE void zero_output() {
#pragma unroll
        for (int i = 0; i < d_v / 2; ++i) rmem_O[i] = 0.f;
    }

    FLASH_DEVICE RowState row_state() const {
        return {{softmax.sum[0], softmax.sum[1]}, {softmax.reference[0], softmax.reference[1]}};
    }

    FLASH_DEVICE void finish(const ItemOf<Kernel> &ended, const PutAside &, uint32_t q_slot) {
        finish(ended, this->aside(), q_slot);
    }
    FLASH_DEVICE void finish(const ItemOf<Kernel> &ended, const RowState &state, uint32_t q_slot) {
        // Until O has been staged the slot still holds the item: no register has to carry it through the
        // loops.
        const ItemOf<Kernel> done = Kernel::direct_store ? ended : read_item_of(smem, q_slot);
        if constexpr (Kernel::chunk_tiles > 0) {
            RowState whole = state;
            this->join_kept_sums(whole, done, this->last_block(done));
            // What follows from the lane is found here, and takes no registers in the loops of tiles.
            finish_item<Kernel>(rmem_O, whole, args, smem, done, q_slot, warpgroup, warp,
                                computed_here(lane));
        } else {
            finish_item<Kernel>(rmem_O, state, args, smem, done, q_slot, warpgroup, warp, lane);
        }
    }

    // ---------------------------------------------------------------- from tile to tile
    // Calls first_tile.operator()<n_columns>(), with as many columns as must be computed of the first tile.
    // The products are issued and waited for within: one that is still running where branches meet would make
    // each wait for the one before.
    template <typename FirstTile>
    FLASH_DEVICE void with_first_columns(const FirstTile &first_tile) {
        if constexpr (Kernel::half_tiles) {
            if (this->sees_half_tile(kv_block)) return first_tile.template operator()<B_c / 2>();
        }
        first_tile.template operator()<B_c>();
    }

    // To the warpgroup's first tile of its item, from the item's first.
    FLASH_DEVICE void go_to_first_tile() {
        pass_tiles_of_the_other_block();
        kv_block = this->leading_kv_block();
        skip_leading_tiles();
        enter_chunk();
    }

    // The tile in hand is the first of a chunk of keys.
    FLASH_DEVICE void enter_chunk() {
        if constexpr (Kernel::chunk_tiles > 0) chunks.end_of_loops = this->end_of_chunk(kv_block);
    }

    // The tile in hand has arrived.
    FLASH_DEVICE void await_k() {
        mbarrier_wait(smem.k_full(kv.k_slot()), kv.k_phase());
        if constexpr (Kernel::mod_hides_keys) {
            tile_words = read_tile(smem, kv.k_slot(), warpgroup);
        }
        if constexpr (Kernel::begins_scores) this->begin_scores();
    }

    // To the tile behind the one in hand.
    FLASH_DEVICE void go_to_next_tile() {
        if constexpr (Kernel::mod_hides_keys) {
            kv_block = tile_words.next;
        } else {
            --kv_block;
        }
    }

    // Of paired blocks the one with the lower queries passes on what lies above its diagonal. All its
    // warpgroups do, so that nobody's turn is missed.
    FLASH_DEVICE void pass_tiles_of_the_other_block() {
        if constexpr (Kernel::passes_tiles) {
            const int end = this->end_kv_block(item);
#pragma unroll 1
            for (; item.end_kv_block > end; --item.end_kv_block) pass_tile();
        }
    }

    FLASH_DEVICE void pass_tile() {
        mbarrier_wait(smem.k_full(kv.k_slot()), kv.k_phase());
        this->release_tile(smem.k_empty(kv.k_slot()));
        mbarrier_wait(smem.v_full(kv.v_slot()), kv.v_phase());
        this->release_tile(smem.v_empty(kv.v_slot()));
        kv.advance();
    }

    // Passes the tiles before the first one on unused, with all the turns and releases of those that are
    // used.
    FLASH_DEVICE void skip_leading_tiles() {
        if constexpr (Kernel::max_skipped_tiles > 0) {
#pragma unroll 1
            for (int skipped = item.end_kv_block - 1; skipped > kv_block; --skipped) {
                mbarrier_wait(smem.k_full(kv.k_slot()), kv.k_phase());
                this->await_turn();
                this->pass_turn();
                this->release_tile(smem.k_empty(kv.k_slot()));
                mbarrier_wait(smem.v_full(kv.v_slot()), kv.v_phase());
                this->release_tile(smem.v_empty(kv.v_slot()));
                kv.advance();
            }
        }
    }

    FLASH_DEVICE void fetch_item() {
        mbarrier_wait(smem.q_full(q.slot()), q.phase());  // Q and its item are there
        take_item();
        this->find_steps();
        load_query_registers();
    }

    // What the Q slot says of the item in hand.
    FLASH_DEVICE void take_item() {
        item = read_item_of(smem, q.slot());
        // Loop bounds must be known to be uniform, or the loops' slots are not (see products.cuh).
        item.q_block = __shfl_sync(kAllLanes, item.q_block, 0);
        item.end_kv_block = __shfl_sync(kAllLanes, item.end_kv_block, 0);
        if (Kernel::tiles_begin) item.first_kv_block = __shfl_sync(kAllLanes, item.first_kv_block, 0);
        if (Kernel::traits.varlen) {
            item.seq_len_q = __shfl_sync(kAllLanes, item.seq_len_q, 0);
            item.seq_len_k = __shfl_sync(kAllLanes, item.seq_len_k, 0);
        }
    }

    // Lane 8 i + j addresses row j of matrix i: 0, 1 are rows 0-7 and 8-15 of the warp's columns 0-7, 2, 3
    // the same of columns 8-15.
    FLASH_DEVICE void load_query_registers() {
        const uint32_t row = warpgroup * kWarpgroupRows + warp * 16 + (lane & 15);
#pragma unroll
        for (int i = 0; i < Kernel::cfg.q_register_steps; ++i) {
            const uint32_t chunk = 2 * (Kernel::q_shared_steps + i) + (lane >> 4);
            uint32_t a[4];
            ldmatrix(a, smem.q(q.slot()) + chunk_offset(B_r, row, chunk));
#pragma unroll
            for (int j = 0; j < 4; ++j) rmem_Q[4 * i + j] = a[j];
        }
    }

    // ---------------------------------------------------------------- products
    // The opaque zero is the sign of a sum of powers of two (the hardware's NaN is positive too).
    FLASH_DEVICE void use_slots(uint32_t k, uint32_t v) {
        tiles = products.descriptors(make_uniform(k, v, q.slot(), __float_as_uint(softmax.sum[0]) >> 31));
    }

    // S is there; P V goes on.
    FLASH_DEVICE void await_scores() {
        wgmma_wait<1>();
        pin_registers(rmem_S);
    }

    // P V is done. ptxas moves this wait up in front of the exponentials, unless a branch that depends on
    // them stands before it: forced_overlap adds one, which no finite sum takes.
    FLASH_DEVICE void await_pv(uint32_t v_slot) {
        if (Kernel::cfg.forced_overlap &&
            __any_sync(kAllLanes, fmaxf(softmax.sum[0], softmax.sum[1]) > 1e36f)) {
            store_shared(smem.sink(), 1);
        }
        wgmma_wait<0>();
        pin_output();
        this->release_tile(smem.v_empty(v_slot));
    }

    FLASH_DEVICE void pin_output() {
        pin_registers(rmem_O);
        pin_registers(rmem_P);
    }
};

}  // namespace flash::hopper
