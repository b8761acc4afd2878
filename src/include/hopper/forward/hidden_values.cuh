// Values that a window hides from all queries of a block, in the last tile of its item: the tile's first
// rows.
//
// The tile has them all the same, and they may be what is left of other sequences: pages of keys that no
// window reaches any more are given away. Of K that does no harm, for scores are masked. Of V it would: P is
// 0 there, but 0 * NaN is NaN. So these rows of V become zeros in shared memory; all of the tile, where the
// block sees no key.
#pragma once

#include "hopper/forward/consumer.cuh"

namespace flash::hopper {

// V's tile is at `position`, the last of `item`. Each warpgroup clears the rows for itself, before it issues
// the product: that another one's product reads what that one has cleared does no harm. No wgmma is in
// flight.
template <typename Kernel, typename Position>
FLASH_DEVICE void clear_hidden_values(Consumer<Kernel> &wg, const ItemOf<Kernel> &item,
                                      const Position &position) {
    if constexpr (Kernel::traits.window) {
        constexpr int kRowChunks = kPanelRowBytes / kChunkBytes;
        const int seq_len_q = Kernel::traits.varlen ? item.seq_len_q : wg.args.work.seq_len_q;
        const int seq_len_k = Kernel::traits.varlen ? item.seq_len_k : wg.args.work.seq_len_k;
        const auto mask = wg.args.template mask<Kernel::traits>(seq_len_q, seq_len_k);
        const int block_queries = Kernel::traits.planned ? wg.args.planned.block_queries : Kernel::B_r;
        int n_hidden = mask.visible_begin(item.q_block * block_queries) - item.first_kv_block * Kernel::B_c;
        if constexpr (!Kernel::warp_loads) n_hidden = min(n_hidden, Kernel::B_c);
        if constexpr (Kernel::traits.paged) {
            // Rows behind the last key are copies of it (page_part.cuh), which here is hidden too.
            if (n_hidden >= seq_len_k - item.first_kv_block * Kernel::B_c) n_hidden = Kernel::B_c;
        }
        if (n_hidden <= 0) return;
        mbarrier_wait(wg.smem.v_full(position.v_slot()), position.v_phase());
        const uint32_t smem_V = wg.smem.v(position.v_slot());
        // Rows are cleared whole: in which order the swizzle has their chunks does not matter.
#pragma unroll 1
        for (int i = wg.warp * kWarpSize + wg.lane; i < n_hidden * kRowChunks; i += kWarpgroupThreads) {
#pragma unroll
            for (int panel = 0; panel < panel_count(Kernel::d_head_v); ++panel) {
                store_shared(smem_V + panel * (Kernel::B_c * kPanelRowBytes) + i * kChunkBytes,
                             make_int4(0, 0, 0, 0));
            }
        }
        fence_async_proxy();  // wgmma must see what was written
        wg.sync_warpgroup();  // ... by every thread
    }
}

}  // namespace flash::hopper
