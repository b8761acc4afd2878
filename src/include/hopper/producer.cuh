// The producer warpgroup: one thread loads Q, K and V by TMA, one stores O, and the last two warps fill the
// rows that see no key. It gives most of its registers to the consumers.
#pragma once

#include "hopper/scheduler.cuh"

namespace flash::hopper {

struct TensorMaps {
    const CUtensorMap &q, &k, &v, &o;
};

// The load thread. Tiles of an item go from last to first: ragged and diagonal tiles, which need masks,
// come first, and the steady loop of the consumers has none. K of tile j - 1 is requested before V of tile
// j, the order in which the consumers use them.
template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
struct LoadThread {
    using Static = StaticForwardKernelConfig<CFG, TRAITS>;

    const SharedMemory<CFG, TRAITS> smem;
    const TensorMaps &maps;
    const ForwardKernelArgs &args;
    const uint64_t q_policy = evict_first_policy();
    const uint64_t kv_policy = evict_last_policy();

    RingPosition<Static::kQStages> q_position{1};
    RingPosition<Static::kKvStages> kv_position{1};

    // The V tile whose K has been requested.
    struct {
        int kv_block = -1;  // -1: none
        int head = 0, batch = 0;
        RingPosition<Static::kKvStages> position{0};
    } pending_v;

    FLASH_DEVICE void run() {
        Scheduler<CFG, TRAITS> scheduler(args);
        while (scheduler.has_item()) {
            const WorkItem item = scheduler.item();
            scheduler.advance();
            const int kv_head = item.head / args.group_size;
            // With one slot Q waits for the whole item before it: the first K goes first.
            if (Static::kQStages > 1) load_q(item);
            for (int kv_block = item.n_kv_blocks - 1; kv_block >= 0; --kv_block) {
                load_k(kv_block, kv_head, item.batch);
                load_pending_v();
                if (Static::kQStages == 1 && kv_block == item.n_kv_blocks - 1) load_q(item);
                pending_v = {kv_block, kv_head, item.batch, kv_position};
                kv_position.advance();
            }
            scheduler.prefetch();
        }
        load_pending_v();
        announce_end();
        scheduler.finish();
    }

  private:
    FLASH_DEVICE void load_q(const WorkItem &item) {
        const uint32_t slot = q_position.slot();
        mbarrier_wait(smem.q_empty(slot),
                      q_position.phase());  // Q, the item, and O staged there, are done with
        store_shared(smem.item(slot), make_int4(item.q_block, item.head, item.batch, item.n_kv_blocks));
        mbarrier_arrive_expect(smem.q_full(slot), Static::kQBytes);
#pragma unroll
        for (int panel = 0; panel < panel_count(Static::d_head); ++panel) {
            tma_load(smem.q(slot) + panel * Static::B_r * kPanelRowBytes, &maps.q, smem.q_full(slot),
                     panel * kPanelColumns, item.q_block * Static::B_r, item.head, item.batch, q_policy);
        }
        q_position.advance();
    }

    FLASH_DEVICE void load_k(int kv_block, int head, int batch) {
        const uint32_t slot = kv_position.slot();
        mbarrier_wait(smem.k_empty(slot), kv_position.phase());  // every consumer warp has used the old tile
        mbarrier_arrive_expect(smem.k_full(slot), Static::kKBytes);
#pragma unroll
        for (int panel = 0; panel < panel_count(Static::d_head); ++panel) {
            tma_load(smem.k(slot) + panel * Static::B_c * kPanelRowBytes, &maps.k, smem.k_full(slot),
                     panel * kPanelColumns, kv_block * Static::B_c, head, batch, kv_policy);
        }
    }

    FLASH_DEVICE void load_pending_v() {
        if (pending_v.kv_block < 0) return;
        const uint32_t slot = pending_v.position.slot();
        mbarrier_wait(smem.v_empty(slot), pending_v.position.phase());  // as for K
        mbarrier_arrive_expect(smem.v_full(slot), Static::kVBytes);
#pragma unroll
        for (int panel = 0; panel < panel_count(Static::d_head_v); ++panel) {
            tma_load(smem.v(slot) + panel * Static::B_c * kPanelRowBytes, &maps.v, smem.v_full(slot),
                     panel * kPanelColumns, pending_v.kv_block * Static::B_c, pending_v.head, pending_v.batch,
                     kv_policy);
        }
        pending_v.kv_block = -1;
    }

    FLASH_DEVICE void announce_end() {
        mbarrier_wait(smem.q_empty(q_position.slot()), q_position.phase());
        store_shared(smem.item(q_position.slot()), make_int4(0, 0, 0, kNoMoreItems));
        mbarrier_arrive(smem.q_full(q_position.slot()));
    }
};

// The store thread: sends O, which the consumers have staged in their item's Q slot, to global memory, and
// only then frees the slot for the next Q. Rows past the end of the sequence are cut off by the tensor map.
template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
FLASH_DEVICE void run_store_thread(const SharedMemory<CFG, TRAITS> smem, const TensorMaps &maps) {
    using Static = StaticForwardKernelConfig<CFG, TRAITS>;
    RingPosition<Static::kQStages> position{0};
    for (;;) {
        mbarrier_wait(smem.q_full(position.slot()), position.phase());  // the item is there
        const int4 item = load_shared_int4(smem.item(position.slot()));
        if (item.w == kNoMoreItems) break;
        mbarrier_wait(smem.o_staged(position.slot()), position.phase());  // all consumer warps have written O
#pragma unroll
        for (int warpgroup = 0; warpgroup < Static::n_consumers; ++warpgroup) {
#pragma unroll
            for (int panel = 0; panel < panel_count(Static::d_head_v); ++panel) {
                tma_store(smem.q(position.slot()) + panel * Static::B_r * kPanelRowBytes +
                              warpgroup * kWarpgroupRows * kPanelRowBytes,
                          &maps.o, panel * kPanelColumns, item.x * Static::B_r + warpgroup * kWarpgroupRows,
                          item.y, item.z);
            }
        }
        tma_store_commit();
        tma_store_wait_read();  // O has been read: the next Q may overwrite it
        mbarrier_arrive(smem.q_empty(position.slot()));
        position.advance();
    }
    tma_store_wait();  // shared memory must outlive the stores
}

}  // namespace flash::hopper
