// How K and V blocks come into shared memory, and what keeps a warp from reading a block that is not
// complete or overwriting one that another warp still reads. Three schedules with one interface; j is
// the block that is worked on, blocks count down, | is a barrier of the thread block:
//
//   kv_stages = 1, one slot. Copies run until the next barrier:
//                       V(j) ──────────┐   K(j-1) ──────────────────┐
//                     | S = Q K(j)^T   | softmax   O += P V(j)      |  …
//                     without eager_load_blocks: K(j), wait, S, V(j), wait, …
//
//   kv_stages = n       n - 1 blocks, K and V, are under way or there. One barrier a block, behind which
//                       the slot of block j+1 is free for block j-n+1:
//                     | K, V(j-n+1) ───────────────────────── …
//                     | S = Q K(j)^T   softmax   O += P V(j) | …
//
//   mbarrier            the same without making warps wait for each other: a slot has a barrier that its
//                       copies complete (full; with split keys V has one of its own) and one that its
//                       readers complete (empty). A warp waits for the first before it reads, for the second
//                       only when it wants to fill the slot, so the warps of a thread block drift apart by up
//                       to n - 1 blocks.
#pragma once

#include "ampere/forward/static_kernel_configuration.cuh"
#include "ampere/load_store.cuh"
#include "ampere/paged_load.cuh"
#include "common/mod_tiles.cuh"
#include "common/ptx.cuh"

namespace flash::ampere {

// Where the blocks of one head come from: a thread's loaders, and how many blocks are still to be loaded.
template <typename Kernel>
struct KVSource {
    using Loader = KVLoader<Kernel>;
    Loader K;
    Loader V;
    int blocks_left;  // 1: the block that is loaded next is the last
    int hidden_keys;  // window: the first rows of the last block, which no query of the thread block sees
    [[no_unique_address]] TileWalk<Kernel> walk;

    // To the block behind the one that was loaded.
    FLASH_DEVICE void advance() {
        if constexpr (Kernel::mod_hides_keys) {
            const int loaded = walk.first + blocks_left - 1;
            const int next = walk.behind(loaded);
            K.skip(loaded - 1 - next);
            V.skip(loaded - 1 - next);
            blocks_left = next - walk.first + 1;
        } else {
            --blocks_left;
        }
    }

    template <bool kEdge>
    FLASH_DEVICE void load_K(int valid_keys, uint32_t slot = 0) {
        K.template load<kEdge>(valid_keys, slot);
    }

    // Hidden rows of V become zeros: what is in their place, NaN maybe, would outlive the product with P = 0.
    // Those of K need not: their scores are masked.
    template <bool kEdge>
    FLASH_DEVICE void load_V(int valid_keys, uint32_t slot = 0) {
        if constexpr (Kernel::traits.window) {
            if (blocks_left == 1 && hidden_keys > 0) {
                return V.load_rows(hidden_keys, kEdge ? valid_keys : Kernel::B_c, slot);
            }
        }
        V.template load<kEdge>(valid_keys, slot);
    }
};

// One slot for K and one for V.
template <typename Kernel>
struct SingleSlot {
    static constexpr bool waits_for_Q = true;  // before the first block, whoever needs it
    static constexpr bool eager = Kernel::cfg.eager_load_blocks;

    KVSource<Kernel> source;

    FLASH_DEVICE SingleSlot(const KVSource<Kernel> &kv, uint32_t) : source(kv) {}

    FLASH_DEVICE static uint32_t offset() { return 0; }

    // Q is under way. `valid_keys`: rows of the first block that lie within the tensor.
    FLASH_DEVICE void start(int valid_keys) {
        if constexpr (eager) source.template load_K<true>(valid_keys);
    }

    FLASH_DEVICE void wait_for_Q() {
        wait_for_copies<Kernel>();
        __syncthreads();
    }

    template <bool kEdge>
    FLASH_DEVICE void before_scores(int valid_keys) {
        if constexpr (!eager) source.template load_K<kEdge>(valid_keys);
        wait_for_copies<Kernel>();
        __syncthreads();  // K is complete; all warps are done with the V block before it
        if constexpr (eager) {
            // Always true; but under a condition the compiler does not work out addresses ahead of the loop.
            if (source.blocks_left > 0) source.template load_V<kEdge>(valid_keys);
        }
    }

    template <bool kEdge>
    FLASH_DEVICE void after_scores(int valid_keys) {
        if constexpr (!eager) source.template load_V<kEdge>(valid_keys);
        wait_for_copies<Kernel>();
        __syncthreads();  // V is complete; all warps are done with K
        source.advance();
        if constexpr (eager) {
            if (source.blocks_left > 0) source.template load_K<false>(Kernel::B_c);
        }
    }

    FLASH_DEVICE void after_output() {}
    FLASH_DEVICE void drain(bool = true) {}
};

// What the two schedules with several slots share: the ring of slots that hold K and V of a block. The slot
// behind the one that is worked on is the next to be filled.
template <typename Kernel>
struct SlotRing {
    static constexpr bool waits_for_Q = false;  // Q is complete when the first block is
    static constexpr int slots = Kernel::cfg.kv_stages;
    static constexpr uint32_t slot_bytes = 2 * Kernel::KVTile::bytes;

    KVSource<Kernel> source;
    uint32_t slot = 0;

    FLASH_DEVICE uint32_t offset() const { return slot * slot_bytes; }
    FLASH_DEVICE uint32_t slot_behind() const { return slot == 0 ? slots - 1 : slot - 1; }
    FLASH_DEVICE void advance() { slot = slot == slots - 1 ? 0 : slot + 1; }

    template <bool kEdge>
    FLASH_DEVICE void load_block(uint32_t into, int valid_keys) {
        if (source.blocks_left > 0) {
            source.template load_K<kEdge>(valid_keys, into * slot_bytes);
            source.template load_V<kEdge>(valid_keys, into * slot_bytes);
        }
        source.advance();
    }
};

// Several slots, one barrier of the thread block for each K/V block. Copies of a block are a group, which
// may be empty, so that the number of groups says which blocks are complete.
template <typename Kernel>
struct BarrierRing : SlotRing<Kernel> {
    using Ring = SlotRing<Kernel>;

    FLASH_DEVICE BarrierRing(const KVSource<Kernel> &kv, uint32_t) : Ring{kv} {}

    FLASH_DEVICE void start(int valid_keys) {
        cp_async_commit();  // Q
        Ring::template load_block<true>(0, valid_keys);
        cp_async_commit();
#pragma unroll
        for (int i = 1; i < Ring::slots - 1; ++i) {
            Ring::template load_block<false>(i, Kernel::B_c);
            cp_async_commit();
        }
    }

    FLASH_DEVICE void wait_for_Q() {
        cp_async_wait_group<Ring::slots - 1>();
        __syncthreads();
    }

    template <bool kEdge>
    FLASH_DEVICE void before_scores(int) {
        cp_async_wait_group<Ring::slots - 2>();
        __syncthreads();  // K and V are complete; all warps are done with the block before
        Ring::template load_block<false>(Ring::slot_behind(), Kernel::B_c);
        cp_async_commit();
    }

    template <bool kEdge>
    FLASH_DEVICE void after_scores(int) {}

    FLASH_DEVICE void after_output() { Ring::advance(); }
    FLASH_DEVICE void drain(bool = true) { cp_async_wait_all(); }
};

// Several slots, two mbarriers for each.
template <typename Kernel>
struct MbarrierRing : SlotRing<Kernel> {
    using Ring = SlotRing<Kernel>;
    // Where copies are what takes the time, scores do not wait for V.
    static constexpr bool separate_V = Kernel::has_parts && 3 * 8 * Ring::slots <= kBarrierBytes;

    uint32_t barriers;    // shared memory: full[slots], empty[slots], full_V[slots], 8 bytes each
    uint32_t parity = 0;  // how often the ring was gone through

    FLASH_DEVICE MbarrierRing(const KVSource<Kernel> &kv, uint32_t smem_barriers)
        : Ring{kv}, barriers(smem_barriers) {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 0; i < Ring::slots; ++i) {
                mbarrier_init(full(i), Kernel::n_threads);
                mbarrier_init(empty(i), Kernel::cfg.n_warps * kArrivalsOfWarp);
                if constexpr (separate_V) mbarrier_init(full_V(i), Kernel::n_threads);
            }
        }
        __syncthreads();  // the barriers can be used
    }

    FLASH_DEVICE void start(int valid_keys) {
        cp_async_commit();  // Q
        load<true>(0, valid_keys);
#pragma unroll
        for (int i = 1; i < Ring::slots - 1; ++i) load<false>(i, Kernel::B_c);
        cp_async_commit();
    }

    FLASH_DEVICE void wait_for_Q() {
        cp_async_wait_group<1>();
        __syncthreads();
    }

    template <bool kEdge>
    FLASH_DEVICE void before_scores(int) {
        mbarrier_wait(full(this->slot), parity);  // K is complete, and V, if it has no barrier of its own
    }

    template <bool kEdge>
    FLASH_DEVICE void after_scores(int) {
        const uint32_t behind = Ring::slot_behind();
        // All warps are done with the block before. At the first block the last slot is still unused; a new
        // barrier lets pass whoever waits for the phase before its first, of parity 1.
        if (this->source.blocks_left > 0) mbarrier_wait(empty(behind), parity ^ uint32_t(this->slot == 0));
        load<false>(behind, Kernel::B_c);
        if constexpr (separate_V) mbarrier_wait(full_V(this->slot), parity);
    }

    FLASH_DEVICE void after_output() {
        __syncwarp();  // all lanes have read their fragments
        if (arrives_for_warp(threadIdx.x % kWarpSize)) mbarrier_arrive(empty(this->slot));
        Ring::advance();
        parity ^= uint32_t(this->slot == 0);
    }

    // After the last block: the barriers of this ring are done with, and another may take their place behind
    // a barrier of the thread block. Arrivals for blocks that were not there are waited for, unless the ring
    // was never started.
    FLASH_DEVICE void drain(bool started = true) {
#pragma unroll 1
        for (int i = 1; started && i < Ring::slots; ++i) {
            mbarrier_wait(full(this->slot), parity);
            if constexpr (separate_V) mbarrier_wait(full_V(this->slot), parity);
            Ring::advance();
            parity ^= uint32_t(this->slot == 0);
        }
        __syncthreads();  // nobody waits for one any more
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 0; i < (separate_V ? 3 : 2) * Ring::slots; ++i)
                mbarrier_invalidate(barriers + 8 * i);
        }
    }

  private:
    FLASH_DEVICE uint32_t full(uint32_t i) const { return barriers + 8 * i; }
    FLASH_DEVICE uint32_t empty(uint32_t i) const { return barriers + 8 * (Ring::slots + i); }
    FLASH_DEVICE uint32_t full_V(uint32_t i) const { return barriers + 8 * (2 * Ring::slots + i); }

    template <bool kEdge>
    FLASH_DEVICE void load(uint32_t into, int valid_keys) {
        if constexpr (separate_V) {
            const bool exists = this->source.blocks_left > 0;
            if (exists) this->source.template load_K<kEdge>(valid_keys, into * Ring::slot_bytes);
            mbarrier_arrive_after_copies(full(into));
            if (exists) this->source.template load_V<kEdge>(valid_keys, into * Ring::slot_bytes);
            mbarrier_arrive_after_copies(full_V(into));
            this->source.advance();
        } else {
            Ring::template load_block<kEdge>(into, valid_keys);
            mbarrier_arrive_after_copies(full(into));
        }
    }
};

template <typename Kernel>
struct PipelineOf {
    using type = SingleSlot<Kernel>;
};
template <typename Kernel>
    requires(Kernel::cfg.kv_stages > 1 && !Kernel::cfg.mbarrier)
struct PipelineOf<Kernel> {
    using type = BarrierRing<Kernel>;
};
template <typename Kernel>
    requires(Kernel::cfg.mbarrier)
struct PipelineOf<Kernel> {
    using type = MbarrierRing<Kernel>;
};

template <typename Kernel>
using Pipeline = typename PipelineOf<Kernel>::type;

}  // namespace flash::ampere
