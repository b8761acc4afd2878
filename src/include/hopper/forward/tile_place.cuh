// Where the tiles of an item lie, for the tensor maps.
#pragma once

#include "hopper/forward/kernel_args.cuh"
#include "tma/page_part.cuh"

namespace flash::hopper {

// Where a tensor's tiles of one item are, for the tensor map: head, batch item, and of a ragged map
// (tensor_view.cuh) the row of the sequence's first row and the sequence's end.
struct TilePlace {
    int head, batch;  // paged: the sequence, or the page, as the batch item
    int row, end;
};

// Of a planned item the row is that of a map whose rows have the heads of a group before them.
template <typename Kernel>
FLASH_DEVICE TilePlace query_place(const ForwardKernelArgs &args, const PlannedItem &item) {
    return {item.head, 0, args.planned.longest_q - item.seq_len_q, item.q_row + item.seq_len_q};
}

template <typename Kernel>
FLASH_DEVICE TilePlace query_place(const ForwardKernelArgs &args, const WorkItem &item) {
    if constexpr (!Kernel::traits.varlen) return {item.head, item.batch, 0, 0};
    const SequenceRows rows = query_rows<Kernel::traits>(args, item);
    return {item.head, rows.batch, args.work.seq_len_q - rows.n_rows, rows.first_row + rows.n_rows};
}

template <typename Kernel, typename Item>
FLASH_DEVICE TilePlace key_place(const ForwardKernelArgs &args, const Item &item) {
    const int head = item.head / args.heads_per_kv_head;
    if constexpr (!Kernel::traits.varlen) return {head, item.batch, 0, 0};
    if constexpr (Kernel::traits.paged) return {head, item.batch, 0, item.seq_len_k};
    const bool packed = args.cu_seqlens_k != nullptr;
    return {head, packed ? 0 : item.batch, args.work.seq_len_k - item.seq_len_k, item.k_row + item.seq_len_k};
}

// The pages of a tile of keys, as a whole warp knows them: each lane has looked up one part of the tile. So
// what the table says is on its way for all parts at once, and serves K and V.
template <typename Kernel>
struct TilePages {
    uint32_t entry;  // of the table; used when a part's place is asked for, so that nobody waits here
    int row, end;

    static_assert(Kernel::B_c <= 16 * kWarpSize, "a lane for each part of a tile, of 16 rows at least");

    FLASH_DEVICE static TilePages look_up(const ForwardKernelArgs &args, int kv_block,
                                          const TilePlace &keys) {
        const int lane = threadIdx.x % kWarpSize;
        const int row = min(lane * args.box_rows, Kernel::B_c - 1);  // of further lanes none that is used
        const PagePart part = page_part(args.page_size, kv_block * Kernel::B_c + row, keys.end);
        return {static_cast<uint32_t>(
                    __ldg(args.block_table + int64_t(keys.batch) * args.max_pages + part.entry)),
                part.row, part.end};
    }

    // Called by the whole warp. An entry that names no page is taken for the last page: copies of boxes
    // without any existing row are forbidden (page_part.cuh).
    FLASH_DEVICE TilePlace part(const ForwardKernelArgs &args, int number, const TilePlace &keys) const {
        const uint32_t page = min(entry, static_cast<uint32_t>(args.n_pages - 1));
        return {keys.head, static_cast<int>(__shfl_sync(kAllLanes, page, number)),
                __shfl_sync(kAllLanes, row, number), __shfl_sync(kAllLanes, end, number)};
    }
};

// Of keys that are not in pages.
struct NoTilePages {
    template <typename... Of>
    FLASH_DEVICE static NoTilePages look_up(const Of &...) {
        return {};
    }
};

template <typename Kernel>
using TilePagesOf = std::conditional_t<Kernel::traits.paged, TilePages<Kernel>, NoTilePages>;

}  // namespace flash::hopper
