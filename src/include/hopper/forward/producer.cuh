// The producer warpgroup: one thread, of keys in pages one warp, loads Q, K and V by TMA, one thread stores
// O, and the last two warps find what scores begin at (begun_scores.cuh) and fill the rows that see no key.
// It gives most of its registers to the consumers.
#pragma once

#include "hopper/forward/epilogue.cuh"
#include "hopper/forward/tile_place.cuh"
#include "hopper/forward/tile_slot.cuh"
#include "hopper/forward/visited_tiles.cuh"
#include "tma/scheduler.cuh"

namespace flash::hopper {

struct TensorMaps {
    const CUtensorMap &q, &k, &v, &o;
    const CUtensorMap *streamed = nullptr;  // of what a mod captured
};

// The load thread. Tiles of an item go from last to first: ragged and diagonal tiles, which need masks,
// come first, and the steady loop of the consumers has none. K of tile j - 1 is requested before V of tile
// j, the order in which the consumers use them. Of keys in pages it is a warp, whose lanes look up pages; one
// of them does what is done once.
template <typename Kernel>
struct LoadThread {
    using Items = Scheduler<Kernel, ForwardKernelArgs, SharedMemory<Kernel>>;
    using Pages = TilePagesOf<Kernel>;

    const SharedMemory<Kernel> smem;
    const TensorMaps &maps;
    const KernelArgs<typename Kernel::Mod> &args;
    const uint64_t q_policy = evict_first_policy();
    const uint64_t kv_policy = Kernel::cfg.keys_once ? evict_first_policy() : evict_last_policy();

    RingPosition<Kernel::q_stages> q_position{1};
    RingPosition<Kernel::k_stages> k_position{1};
    RingPosition<Kernel::v_stages> v_position{1};

    // The V tile whose K has been requested.
    struct {
        int kv_block = -1;  // -1: none
        TilePlace place;
        Pages pages;
    } pending_v;

    // Called by one thread, with warp_loads by its whole warp.
    FLASH_DEVICE void run() {
        const bool loads = Kernel::traits.paged || !Kernel::warp_loads || threadIdx.x % 32 == 0;
        Items scheduler(args, smem);
        while (scheduler.has_item()) {
            const WorkItem item = scheduler.item();
            scheduler.advance();
            if (Kernel::warp_loads && !item.has_tiles()) {
                fill_item_without_keys<Kernel>(args, item);
            } else if (loads) {
                load_item(item, scheduler);
            }
            scheduler.prefetch();
        }
        if (!loads) return;
        load_pending_v();
        if (Kernel::traits.split) launch_dependents();  // the kernel that combines the parts
        announce_end();
        if (is_leader()) scheduler.finish();
    }

    // Planned items come from another warp (planner.cuh). It looks for the next while the last tiles of the
    // one before are loaded: early enough that the next is there in time, and late enough that no block takes
    // an item of many tiles that another could begin first. Called by one thread, with paged by its whole
    // warp.
    FLASH_DEVICE void run_planned() {
        RingPosition<kFoundSlots> position{0};
        for (;; position.advance()) {
            const uint32_t slot = position.slot();
            mbarrier_wait(smem.found_full(slot), position.phase());  // an item is there
            const PlannedItem item = read_planned_item(smem.found(slot));
            if constexpr (Kernel::traits.paged) __syncwarp();  // all lanes have read it
            if (item.end_kv_block == kNoItem) break;
            const int last_tiles = (Kernel::tiles_begin ? item.first_kv_block : 0) + kTilesOfPlanning;
            const auto look_for_next = [&] {
                if (kEveryLaneArrives || is_leader()) mbarrier_arrive(smem.found_empty(slot));
            };
            if (item.end_kv_block <= last_tiles) look_for_next();
            load_tiles(item, [&](int kv_block) {
                if (kv_block == last_tiles) look_for_next();
            });
        }
        load_pending_v();
        launch_dependents();  // the kernel that combines the parts
        announce_end();
    }

  private:
    static constexpr int kFoundSlots = max_of(SharedMemory<Kernel>::kFoundSlots, 1);
    static constexpr int kTilesOfPlanning = 2;  // beside those that the rings hold

    // Who does what is done once: the thread, or one lane of the warp.
    FLASH_DEVICE static bool is_leader() {
        if constexpr (Kernel::traits.paged) return elect_lane();
        return true;
    }

    FLASH_DEVICE void load_item(const WorkItem &item, Items &scheduler) {
        const int first = Kernel::tiles_begin ? item.first_kv_block : 0;
        load_tiles(item, [&](int kv_block) {
            // Behind the second tile: this item's own first tiles come first.
            if (Kernel::prefetch_next + Kernel::mail_slots > 0 &&
                kv_block == max(item.end_kv_block - 2, first)) {
                scheduler.deliver();
                if (Kernel::prefetch_next > 0 && !scheduler.receives() && scheduler.has_item())
                    prefetch_item(scheduler.item());
            }
        });
    }

    // `behind_tile` is called when a tile's loads have been issued.
    template <typename BehindTile>
    FLASH_DEVICE void load_tiles(const ItemOf<Kernel> &item, const BehindTile &behind_tile) {
        if constexpr (Kernel::mod_hides_keys) return load_visited_tiles(item);
        const TilePlace keys = key_place<Kernel>(args, item);
        Pages pages = Pages::look_up(args, item.end_kv_block - 1, keys);
        // With one slot Q waits for the whole item before it: the first K goes first.
        if (Kernel::q_stages > 1) load_q(item);
        const int first = Kernel::tiles_begin ? item.first_kv_block : 0;
        for (int kv_block = item.end_kv_block - 1; kv_block >= first; --kv_block) {
            load_k(kv_block, keys, pages);
            // Ahead of its use: what the table says is on its way while V is loaded.
            const Pages next = Pages::look_up(args, max(kv_block - 1, first), keys);
            load_pending_v();
            if (Kernel::q_stages == 1 && kv_block == item.end_kv_block - 1) load_q(item);
            pending_v = {kv_block, keys, pages};
            k_position.advance();
            behind_tile(kv_block);
            pages = next;
        }
    }

    // The same of the tiles that a mod's mask leaves something of. To the consumers the item ends with the
    // first of them.
    FLASH_DEVICE void load_visited_tiles(ItemOf<Kernel> item) {
        if constexpr (Kernel::mod_hides_keys) {
            const TilePlace keys = key_place<Kernel>(args, item);
            const int first = Kernel::tiles_begin ? item.first_kv_block : 0;
            const auto tiles = visited_tiles_of<Kernel>(args, item);
            Visited tile = tiles.first_of(item.end_kv_block, first);
            item.end_kv_block = tile.kv_block + 1;
            Pages pages = Pages::look_up(args, tile.kv_block, keys);
            if (Kernel::q_stages > 1) load_q(item);
            for (bool leads = true; tile.kv_block >= first; leads = false) {
                // Under a window the first one is always visited: what hidden_values.cuh clears is in it.
                const Visited next = tiles.behind(tile.kv_block, first, Kernel::traits.window);
                mbarrier_wait(smem.k_empty(k_position.slot()), k_position.phase());
                if (is_leader()) write_tile(smem, k_position.slot(), tile.kinds, next.kv_block);
                const Pages next_pages = Pages::look_up(args, max(next.kv_block, first), keys);
                load_k(tile.kv_block, keys, pages);
                load_pending_v();
                if (Kernel::q_stages == 1 && leads) load_q(item);
                pending_v = {tile.kv_block, keys, pages};
                k_position.advance();
                tile = next;
                pages = next_pages;
            }
        }
    }

    // Asks for the first tiles of an item that is yet to come. Until then memory would often stand idle:
    // shared memory has no room for them.
    FLASH_DEVICE void prefetch_item(const WorkItem &item) const {
#pragma unroll 1
        for (int column = 0; column < Kernel::d_head; column += kPanelColumns) {
            tma_prefetch(&maps.q, column, item.q_block * Kernel::B_r, item.head, item.batch);
        }
        const TilePlace keys = key_place<Kernel>(args, item);
        const int first = max(item.end_kv_block - (Kernel::prefetch_next - 1), item.first_kv_block);
#pragma unroll 1
        for (int kv_block = item.end_kv_block - 1; kv_block >= first; --kv_block) {
#pragma unroll 1
            for (int column = 0; column < Kernel::d_head; column += kPanelColumns) {
                tma_prefetch(&maps.k, column, kv_block * Kernel::B_c, keys.head, keys.batch);
            }
#pragma unroll 1
            for (int column = 0; column < Kernel::d_head_v; column += kPanelColumns) {
                tma_prefetch(&maps.v, column, kv_block * Kernel::B_c, keys.head, keys.batch);
            }
        }
    }

    FLASH_DEVICE void load_q(const ItemOf<Kernel> &item) {
        const uint32_t slot = q_position.slot();
        mbarrier_wait(smem.q_empty(slot),
                      q_position.phase());  // Q, the item, and O staged there, are done with
        if (is_leader()) copy_q(slot, item);
        q_position.advance();
    }

    FLASH_DEVICE void copy_q(uint32_t slot, const ItemOf<Kernel> &item) {
        write_item(smem, slot, item);
        const TilePlace place = query_place<Kernel>(args, item);
        if constexpr (Kernel::traits.planned) {
            const PlannedLaunch &planned = args.planned;
            const int box_bytes = planned.block_queries * planned.group * kPanelRowBytes;
            mbarrier_arrive_expect(smem.q_full(slot), panel_count(Kernel::d_head) * box_bytes);
#pragma unroll
            for (int panel = 0; panel < panel_count(Kernel::d_head); ++panel) {
                tma_load(smem.q(slot) + panel * Kernel::B_r * kPanelRowBytes, &maps.q, smem.q_full(slot),
                         panel * kPanelColumns, 0, place.row + item.q_block * planned.block_queries,
                         place.end, place.head, q_policy);
            }
            return;
        }
        mbarrier_arrive_expect(smem.q_full(slot), Kernel::q_bytes);
#pragma unroll
        for (int panel = 0; panel < panel_count(Kernel::d_head); ++panel) {
            load_box(smem.q(slot) + panel * Kernel::B_r * kPanelRowBytes, &maps.q, smem.q_full(slot),
                     panel * kPanelColumns, item.q_block * Kernel::B_r, place, q_policy);
        }
    }

    FLASH_DEVICE void load_box(uint32_t address, const CUtensorMap *map, uint32_t barrier, int column,
                               int row, const TilePlace &place, uint64_t policy) const {
        if constexpr (Kernel::traits.varlen) {
            tma_load(address, map, barrier, column, place.row + row, place.end, place.head, place.batch,
                     policy);
        } else {
            tma_load(address, map, barrier, column, row, place.head, place.batch, policy);
        }
    }

    // (B_c, columns) of K or V; of paired blocks each loads every second panel for both, or half the rows
    // where the panels are odd in number.
    template <int columns>
    FLASH_DEVICE void load_tile(uint32_t address, const CUtensorMap *map, uint32_t barrier, int kv_block,
                                const TilePlace &place, const Pages &pages) const {
        constexpr int kPanelBytes = Kernel::B_c * kPanelRowBytes;
        if constexpr (Kernel::traits.paged) {
#pragma unroll 1
            for (int row = 0, part = 0; row < Kernel::B_c; row += args.box_rows, ++part) {
                const TilePlace page = pages.part(args, part, place);
                if (is_leader()) {
#pragma unroll
                    for (int panel = 0; panel < panel_count(columns); ++panel) {
                        load_box(address + panel * kPanelBytes + row * kPanelRowBytes, map, barrier,
                                 panel * kPanelColumns, 0, page, kv_policy);
                    }
                }
            }
        } else if constexpr (Kernel::paired_blocks && Kernel::kv_box_rows(columns) < Kernel::B_c) {
            const int half = blockIdx.x % 2 * Kernel::kv_box_rows(columns);
#pragma unroll
            for (int panel = 0; panel < panel_count(columns); ++panel) {
                tma_load_for_both(address + panel * kPanelBytes + half * kPanelRowBytes, map, barrier,
                                  panel * kPanelColumns, kv_block * Kernel::B_c + half, place.head,
                                  place.batch, kv_policy);
            }
        } else if constexpr (Kernel::paired_blocks) {
#pragma unroll
            for (int i = 0; i < panel_count(columns); i += 2) {
                const int panel = i + blockIdx.x % 2;
                tma_load_for_both(address + panel * kPanelBytes, map, barrier, panel * kPanelColumns,
                                  kv_block * Kernel::B_c, place.head, place.batch, kv_policy);
            }
        } else {
#pragma unroll
            for (int panel = 0; panel < panel_count(columns); ++panel) {
                load_box(address + panel * kPanelBytes, map, barrier, panel * kPanelColumns,
                         kv_block * Kernel::B_c, place, kv_policy);
            }
        }
    }

    FLASH_DEVICE void load_k(int kv_block, const TilePlace &place, const Pages &pages) {
        const uint32_t slot = k_position.slot();
        mbarrier_wait(smem.k_empty(slot), k_position.phase());  // every consumer warp has used the old tile
        if (is_leader()) mbarrier_arrive_expect(smem.k_full(slot), Kernel::k_bytes);
        load_tile<Kernel::d_head>(smem.k(slot), &maps.k, smem.k_full(slot), kv_block, place, pages);
    }

    FLASH_DEVICE void load_pending_v() {
        if (pending_v.kv_block < 0) return;
        const uint32_t slot = v_position.slot();
        mbarrier_wait(smem.v_empty(slot), v_position.phase());  // as for K
        if (is_leader()) mbarrier_arrive_expect(smem.v_full(slot), Kernel::v_bytes);
        load_tile<Kernel::d_head_v>(smem.v(slot), &maps.v, smem.v_full(slot), pending_v.kv_block,
                                    pending_v.place, pending_v.pages);
        pending_v.kv_block = -1;
        v_position.advance();
    }

    FLASH_DEVICE void announce_end() {
        mbarrier_wait(smem.q_empty(q_position.slot()), q_position.phase());
        if (!is_leader()) return;
        ItemOf<Kernel> end{};
        end.end_kv_block = kNoMoreItems;
        write_item(smem, q_position.slot(), end);
        mbarrier_arrive(smem.q_full(q_position.slot()));
    }
};

// The store thread: sends O, which the consumers have staged in their item's Q slot, to global memory, and
// only then frees the slot for the next Q. Rows past the end of the sequence, and columns past the tensor's,
// are cut off by the tensor map.
template <typename Kernel>
FLASH_DEVICE void run_store_thread(const SharedMemory<Kernel> smem, const TensorMaps &maps,
                                   const ForwardKernelArgs &args) {
    RingPosition<Kernel::q_stages> position{0};
    for (;;) {
        mbarrier_wait(smem.q_full(position.slot()), position.phase());  // the item is there
        const WorkItem item = read_item(smem, position.slot());
        if (item.end_kv_block == kNoMoreItems) break;
        const TilePlace place = query_place<Kernel>(args, item);
        mbarrier_wait(smem.o_staged(position.slot()), position.phase());  // all consumer warps have written O
#pragma unroll
        for (int warpgroup = 0; warpgroup < Kernel::n_consumers; ++warpgroup) {
#pragma unroll
            for (int panel = 0; panel < panel_count(Kernel::d_head_v); ++panel) {
                const uint32_t staged = smem.q(position.slot()) + panel * Kernel::B_r * kPanelRowBytes +
                                        warpgroup * kWarpgroupRows * kPanelRowBytes;
                const int row = item.q_block * Kernel::B_r + warpgroup * kWarpgroupRows;
                if constexpr (Kernel::traits.varlen) {
                    tma_store(staged, &maps.o, panel * kPanelColumns, place.row + row, place.end, place.head,
                              place.batch);
                } else {
                    tma_store(staged, &maps.o, panel * kPanelColumns, row, place.head, place.batch);
                }
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
