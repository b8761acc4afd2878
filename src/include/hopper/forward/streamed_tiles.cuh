// Tiles of a captured tensor that a mod adds to scores, or the like (flash_helpers/mods/ahead.py), where its
// rows lie so that bulk copies can bring them: 16 bits an element, one row a query, one column a key.
//
// A consumer warpgroup has a ring of its own for its 64 rows, and so a copy can be asked for as soon as the
// warpgroup has the tile before in its registers. A thread of the producer's does so beside the load thread:
// it goes from item to item by the words in the Q slots. That no Q slot is filled anew before it has seen its
// item follows from the tiles, which the consumers wait for. What is outside of the tensor arrives as 0, as a
// mod reads it.
#pragma once

#include "hopper/forward/item_slot.cuh"
#include "hopper/forward/pipeline.cuh"
#include "hopper/forward/streamed_view.cuh"

namespace flash::hopper {

// ---------------------------------------------------------------- the producer
// Called by one thread, for every second warpgroup of consumers from `first` on.
template <typename Kernel>
FLASH_DEVICE void run_streaming_thread(const SharedMemory<Kernel> smem, const CUtensorMap *map,
                                       const KernelArgs<typename Kernel::Mod> &args, int first) {
    using Mod = typename Kernel::Mod;
    const uint64_t policy = evict_normal_policy();
    RingPosition<Kernel::q_stages> item_position{0};
    RingPosition<Kernel::streamed_stages> position{1};
    for (;; item_position.advance()) {
        mbarrier_wait(smem.q_full(item_position.slot()), item_position.phase());  // the item is there
        const WorkItem item = read_item<Kernel>(smem, item_position.slot());
        if (item.end_kv_block == kNoMoreItems) break;
        const auto &captured = args.mod.captured;
        const auto once = Mod::once(captured);
        const auto of_head = Mod::head(captured, once, item.batch, item.head);
        const mods::OuterPlace place = Mod::streamed_place(captured, once, of_head, item.batch, item.head);
        const int first_row = item.q_block * Kernel::B_r;
        const int begin = Kernel::tiles_begin ? item.first_kv_block : 0;
#pragma unroll 1
        for (int kv_block = item.end_kv_block - 1; kv_block >= begin; --kv_block, position.advance()) {
            const uint32_t slot = position.slot();
#pragma unroll 1
            for (int group = first; group < Kernel::n_consumers; group += 2) {
                const uint32_t full = smem.streamed_full(group, slot);
                mbarrier_wait(smem.streamed_empty(group, slot), position.phase());  // its warps have read it
                mbarrier_arrive_expect(full, Kernel::streamed_bytes);
#pragma unroll
                for (int panel = 0; panel < panel_count(Kernel::B_c); ++panel) {
                    tma_load(smem.streamed(group, slot) + panel * kWarpgroupRows * kPanelRowBytes, map, full,
                             kv_block * Kernel::B_c + panel * kPanelColumns,
                             first_row + group * kWarpgroupRows, place.head, place.batch, policy);
                }
                // With one slot the next copy is asked for late: it shall not have to wait for memory.
                if constexpr (Kernel::streamed_stages == 1) {
#pragma unroll
                    for (int panel = 0; panel < panel_count(Kernel::B_c); ++panel) {
                        if (kv_block == begin) break;
                        tma_prefetch(map, (kv_block - 1) * Kernel::B_c + panel * kPanelColumns,
                                     first_row + group * kWarpgroupRows, place.head, place.batch);
                    }
                }
            }
        }
    }
}

// ---------------------------------------------------------------- a consumer
// The tile in hand of a warpgroup, which has passed so many before.
template <typename Kernel>
struct StreamedTile {
    uint32_t tile, full, empty, phase;
    uint32_t read = 0;  // follows from all that was read

    FLASH_DEVICE StreamedTile(const SharedMemory<Kernel> &smem, int warpgroup, uint32_t passed) {
        constexpr uint32_t kStages =
            max_of(Kernel::streamed_stages, 1);  // of a kernel without copies none is used
        const uint32_t slot = passed % kStages;
        tile = smem.streamed(warpgroup, slot);
        full = smem.streamed_full(warpgroup, slot);
        empty = smem.streamed_empty(warpgroup, slot);
        phase = passed / kStages & 1;
    }
    FLASH_DEVICE void await() const { mbarrier_wait(full, phase); }
    // From square `first` of 8 columns on, as many as `known` has room for.
    template <typename Known>
    FLASH_DEVICE void read_group(Known &known, int warp, int first, int lane) {
        read ^= known.streamed.template read_tile<kWarpgroupRows>(tile, warp * 16, first, lane);
    }
    // All of it has been read. ptxas moves ldmatrix behind the arrival of a barrier, where the next tile may
    // be on its way, unless something that follows from what it reads is written before.
    FLASH_DEVICE void await_reads(const SharedMemory<Kernel> &smem) const {
        if (read == kAnyWord) store_shared(smem.sink(), kAnyWord);
    }
    static constexpr uint32_t kAnyWord = 0x5eed1e55;
};

}  // namespace flash::hopper
