// Items of dQ: B_r queries of one (batch, query head) pair, and the tiles of keys that some of them see, from
// the first to the last. Under a causal mask the last blocks see most keys, and are taken first.
#pragma once

#include <type_traits>

#include "common/backward/trimmed_tiles.cuh"
#include "hopper/backward/items.cuh"
#include "hopper/backward/static_dq_configuration.cuh"
#include "hopper/ptx_sm90.cuh"

namespace flash::hopper {

// Which item a number is, for Scheduler. With varlen the items of one sequence come before those of the next.
template <typename Kernel>
struct DqItems {
    SequenceGroups groups;  // varlen

    FLASH_DEVICE bool has(const BackwardKernelArgs &args, int number) {
        if constexpr (!Kernel::traits.varlen) return number < args.n_items;
        return groups.advance_to(
            args.batch, number, [&](int sequence) { return owned_queries(args, sequence).n_rows; },
            [&](int n_rows) { return ceil_div(n_rows, Kernel::B_r) * args.n_heads(); });
    }

    FLASH_DEVICE BackwardItem item(const BackwardKernelArgs &args, int number) const {
        BackwardItem item;
        if constexpr (Kernel::traits.varlen) {
            const auto [sequence, in_sequence] = groups.place(number);
            const SequenceRows queries = owned_queries(args, sequence);
            const SequenceRows keys =
                sequence_rows(args.cu_seqlens_k, args.seqused_k, args.seq_len_k, args.rows_k, sequence);
            item = place_of(in_sequence, ceil_div(queries.n_rows, Kernel::B_r), args.n_heads(), args);
            item.batch = sequence;
            item.owned_rows = queries.n_rows;
            const int used = args.seqused_q != nullptr ? args.seqused_q[sequence] : queries.n_rows;
            item.seq_len_q = max_of(0, min_of(used, queries.n_rows));
            item.q_row = queries.first_row;
            item.seq_len_k = keys.n_rows;
            item.k_row = keys.first_row;
        } else {
            item = place_of(number, args.n_tiles, args.batch * args.n_heads(), args);
            item.seq_len_q = item.owned_rows = args.seq_len_q;
            item.seq_len_k = args.seq_len_k;
        }
        const Range keys = seen_keys(args, item);
        item.first_block = keys.begin < keys.end ? keys.begin / Kernel::B_c : 0;
        item.end_block = keys.begin < keys.end ? ceil_div(keys.end, Kernel::B_c) : 0;
        if constexpr (trims_tiles<typename Kernel::Mod, true>()) {
            const int first = item.tile * Kernel::B_r;
            const Range blocks = trimmed_key_tiles<typename Kernel::Mod, Kernel::B_c>(
                mod_of<typename Kernel::Mod>(args), {item.first_block, item.end_block},
                {first, min(first + Kernel::B_r, item.seq_len_q)}, item.seq_len_k, item.batch, item.head);
            item.first_block = blocks.begin;
            item.end_block = blocks.end;
        }
        item.n_steps = item.visited_blocks();
        return item;
    }

  private:
    static FLASH_DEVICE SequenceRows owned_queries(const BackwardKernelArgs &args, int sequence) {
        return sequence_rows(args.cu_seqlens_q, nullptr, args.seq_len_q, args.rows_q, sequence);
    }

    // The keys that some query of the item's block sees.
    static FLASH_DEVICE Range seen_keys(const BackwardKernelArgs &args, const BackwardItem &item) {
        const int first = item.tile * Kernel::B_r;
        const int last = min(first + Kernel::B_r, item.seq_len_q) - 1;
        const VisibleRows<Kernel::traits> visible =
            args.visible<Kernel::traits>(item.seq_len_q, item.seq_len_k);
        const Range seeing = visible.seeing_rows();
        if (last < first || seeing.begin >= seeing.end) return {0, 0};
        return {visible.keys_of(first).begin, visible.keys_of(last).end};
    }

    static FLASH_DEVICE BackwardItem place_of(int number, int n_tiles, int pairs,
                                              const BackwardKernelArgs &args) {
        const ItemPlace place = ordered_item(number, n_tiles, pairs, args.section_heads);
        BackwardItem item{};
        item.tile = n_tiles - 1 - place.tile;
        item.batch = place.pair / args.n_heads();
        item.head = place.pair - item.batch * args.n_heads();
        return item;
    }
};

// Where the rows of an item's queries are: in q, o and dq, and in the LSE and delta.
template <typename Kernel>
FLASH_DEVICE SequenceRows item_queries(const BackwardKernelArgs &args, const BackwardItem &item) {
    const bool packed = Kernel::traits.varlen && args.cu_seqlens_q != nullptr;
    return {packed ? 0 : item.batch, item.q_row, item.owned_rows};
}

template <typename Kernel>
FLASH_DEVICE int64_t item_lse_begin(const BackwardKernelArgs &args, const BackwardItem &item, int head) {
    const bool packed = Kernel::traits.varlen && args.cu_seqlens_q != nullptr;
    return lse_begin(packed, {item.batch, item.q_row, item.owned_rows}, args.n_heads(), head, args.seq_len_q,
                     args.total_q);
}

// dQ = 0 of a block of queries that see no key, and their delta, by a whole warp. Their O is 0.
template <typename Kernel>
FLASH_DEVICE void clear_queries(const BackwardKernelArgs &args, const BackwardItem &item) {
    using Element = std::conditional_t<Kernel::traits.float_query_gradients, float, uint16_t>;
    constexpr int kElements = kChunkBytes / sizeof(Element);
    const uint32_t zeros[4] = {0, 0, 0, 0};
    const SequenceRows rows = item_queries<Kernel>(args, item);
    const int first = item.tile * Kernel::B_r, n_rows = min(Kernel::B_r, rows.n_rows - first);
    const int chunks = (Kernel::traits.padded_head ? args.d_head : Kernel::d_head) / kElements;
    const int64_t numbers = item_lse_begin<Kernel>(args, item, item.head);
#pragma unroll 1
    for (int i = threadIdx.x % kWarpSize; i < n_rows * chunks; i += kWarpSize) {
        const int row = first + i / chunks, chunk = i % chunks;
        if (args.dq != nullptr) {
            store_global_streaming(static_cast<Element *>(args.dq) + rows.batch * args.dq_strides.batch +
                                       (int64_t{rows.first_row} + row) * args.dq_strides.seq +
                                       item.head * args.dq_strides.head + chunk * kElements,
                                   zeros);
        }
        if (chunk == 0 && row < item.seq_len_q) {
            args.written_delta[numbers + row] = args.dlse != nullptr ? -args.dlse[numbers + row] : 0.f;
        }
    }
}

}  // namespace flash::hopper
