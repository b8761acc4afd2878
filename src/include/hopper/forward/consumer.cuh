// What a consumer warpgroup holds, fragments, softmax state and ring positions, and its moves. mainloop.cuh
// puts the moves in order.
//
// The state stands here, the moves in the bases, too: with the softmax in one of these, ptxas serialized
// wgmma for want of registers (C7511).
#pragma once

#include "hopper/forward/begun_scores.cuh"
#include "hopper/forward/epilogue.cuh"
#include "hopper/forward/kept_rows.cuh"
#include "hopper/forward/modified_scores.cuh"
#include "hopper/forward/products.cuh"
#include "hopper/forward/softmax_steps.cuh"
#include "hopper/forward/tile_range.cuh"
#include "hopper/forward/turns.cuh"

namespace flash::hopper {

template <typename Kernel>
struct Consumer : TileRange<Kernel, Consumer<Kernel>>,
                  Turns<Kernel, Consumer<Kernel>>,
                  BegunScores<Kernel, Consumer<Kernel>>,
                  ModifiedScores<Kernel, Consumer<Kernel>>,
                  SoftmaxSteps<Kernel, Consumer<Kernel>>,
                  KeptRows<Kernel, Consumer<Kernel>> {
    static constexpr int B_r = Kernel::B_r, B_c = Kernel::B_c, d_v = Kernel::d_head_v;

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

    FLASH_DEVICE void round_probabilities() {
        this->drop_weights();
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
