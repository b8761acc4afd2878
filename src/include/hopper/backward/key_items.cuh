// The work of a launch, cut into items and put in order.
//
// An item is a tile of B_c keys of one (batch, key head) pair, and the query blocks of all query heads of its
// group that see some of these keys: head by head, each from the first block to the last. Items are numbered
// so that
//   - pairs are taken in sections of `section_heads`;
//   - inside a section the tiles go from the first to the last, so that under a causal mask the longest items
//     start first;
//   - of one tile, the heads of the section come one after another;
//   - with reversed_heads the last pair is the first: the kernels before this one have just touched it.
#pragma once

#include "common/ptx.cuh"
#include "hopper/backward/kernel_args.cuh"
#include "hopper/backward/static_kernel_configuration.cuh"
#include "tma/sequence_finder.cuh"

namespace flash::hopper {

struct KeyItem {
    int key_tile, head, batch;  // head: of keys
    int n_blocks;               // steps over all heads of the group; kEndOfItems: there is no item
    int first_q_block, end_q_block;
    // The sequence's own lengths; varlen: where its rows begin, and how many rows of dk and dv it owns.
    int seq_len_q, seq_len_k;
    int q_row, k_row, owned_keys;
    int first_dq_tile;  // of the sequence, in dq_sums

    FLASH_DEVICE int q_blocks() const { return end_q_block - first_q_block; }
};
inline constexpr int kEndOfItems = -1;
inline constexpr int kItemBytes = 48;

FLASH_DEVICE void write_item(uint32_t address, const KeyItem &item) {
    store_shared(address, make_int4(item.key_tile, item.head, item.batch, item.n_blocks));
    store_shared(address + 16,
                 make_int4(item.first_q_block, item.end_q_block, item.seq_len_q, item.seq_len_k));
    store_shared(address + 32, make_int4(item.q_row, item.k_row, item.owned_keys, item.first_dq_tile));
}

FLASH_DEVICE KeyItem read_item(uint32_t address) {
    const int4 a = load_shared_int4(address), b = load_shared_int4(address + 16),
               c = load_shared_int4(address + 32);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, c.w};
}

// Tile, head and place in the batch of item `number` among `heads` pairs of n_tiles tiles each.
template <bool kReversed>
FLASH_HOST_DEVICE constexpr KeyItem ordered_key_item(int number, int n_tiles, int heads, int section_heads,
                                                     int heads_of_batch) {
    const int items_per_section = section_heads * n_tiles;
    const int section = number / items_per_section;
    const int in_section = number - section * items_per_section;
    const int width = min_of(section_heads, heads - section * section_heads);
    KeyItem item{};
    item.key_tile = in_section / width;
    int pair = section * section_heads + in_section - item.key_tile * width;
    if (kReversed) pair = heads - 1 - pair;
    item.batch = pair / heads_of_batch;
    item.head = pair - item.batch * heads_of_batch;
    return item;
}

// Fills in which query blocks an item visits.
template <typename Kernel>
FLASH_DEVICE void set_query_blocks(const BackwardKernelArgs &args, KeyItem &item) {
    const int first_key = item.key_tile * Kernel::B_c;
    const Range rows = args.visible<Kernel::traits>(item.seq_len_q, item.seq_len_k)
                           .rows_of({first_key, min(first_key + Kernel::B_c, item.seq_len_k)});
    const bool seen = rows.begin < rows.end;
    item.first_q_block = seen ? rows.begin / Kernel::B_r : 0;
    item.end_q_block = seen ? ceil_div(rows.end, Kernel::B_r) : 0;
    item.n_blocks = item.q_blocks() * args.group;
}

// Which item a number is, for Scheduler. With varlen the items of one sequence come before those of the next.
template <typename Kernel>
struct KeyItems {
    SequenceGroups groups;  // varlen

    FLASH_DEVICE bool has(const BackwardKernelArgs &args, int number) {
        if constexpr (!Kernel::traits.varlen) return number < args.n_items;
        return groups.advance_to(
            args.batch, number, [&](int sequence) { return owned_keys(args, sequence).n_rows; },
            [&](int n_rows) { return ceil_div(n_rows, Kernel::B_c) * args.n_heads_kv; });
    }

    FLASH_DEVICE KeyItem item(const BackwardKernelArgs &args, int number) const {
        KeyItem item;
        if constexpr (Kernel::traits.varlen) {
            const auto [sequence, in_sequence] = groups.place(number);
            const SequenceRows keys = owned_keys(args, sequence);
            const SequenceRows queries =
                sequence_rows(args.cu_seqlens_q, args.seqused_q, args.seq_len_q, args.rows_q, sequence);
            item = ordered_key_item<Kernel::cfg.reversed_heads>(
                in_sequence, ceil_div(keys.n_rows, Kernel::B_c), args.n_heads_kv, args.section_heads,
                args.n_heads_kv);
            item.batch = sequence;
            item.seq_len_q = queries.n_rows;
            item.q_row = queries.first_row;
            item.owned_keys = keys.n_rows;
            item.k_row = keys.first_row;
            const int used = args.seqused_k != nullptr ? args.seqused_k[sequence] : keys.n_rows;
            item.seq_len_k = max_of(0, min_of(used, keys.n_rows));
            item.first_dq_tile = args.cu_seqlens_q != nullptr
                                     ? (queries.first_row / kSumRows + sequence) * (kSumRows / Kernel::B_r)
                                     : sequence * args.group * args.n_heads_kv * args.dq_tiles;
        } else {
            item = ordered_key_item<Kernel::cfg.reversed_heads>(
                number, args.n_key_tiles, args.batch * args.n_heads_kv, args.section_heads, args.n_heads_kv);
            item.seq_len_q = args.seq_len_q;
            item.seq_len_k = item.owned_keys = args.seq_len_k;
            item.first_dq_tile = item.batch * args.group * args.n_heads_kv * args.dq_tiles;
        }
        set_query_blocks<Kernel>(args, item);
        return item;
    }

  private:
    static FLASH_DEVICE SequenceRows owned_keys(const BackwardKernelArgs &args, int sequence) {
        return sequence_rows(args.cu_seqlens_k, nullptr, args.seq_len_k, args.rows_k, sequence);
    }
};

}  // namespace flash::hopper
