// Items of dK and dV: a tile of B_c keys of one (batch, key head) pair, and the query blocks of all query
// heads of its group that see some of these keys: head by head, each from the first block to the last. Under
// a causal mask the first tiles are seen by most queries. With reversed_heads the last pair is the first: the
// kernel before this one has just touched it. With keeps_dq a number stands for all tiles of a pair, which
// the load warp makes items of, one after the other.
#pragma once

#include "common/backward/trimmed_tiles.cuh"
#include "hopper/backward/items.cuh"
#include "hopper/backward/static_kernel_configuration.cuh"

namespace flash::hopper {

// Fills in which query blocks an item visits.
template <typename Kernel>
FLASH_DEVICE void set_query_blocks(const BackwardKernelArgs &args, BackwardItem &item) {
    const int first_key = item.tile * Kernel::B_c;
    const Range rows = args.visible<Kernel::traits>(item.seq_len_q, item.seq_len_k)
                           .rows_of({first_key, min(first_key + Kernel::B_c, item.seq_len_k)});
    const bool seen = rows.begin < rows.end;
    item.first_block = seen ? rows.begin / Kernel::B_r : 0;
    item.end_block = seen ? ceil_div(rows.end, Kernel::B_r) : 0;
    // Sums that a block keeps begin with the first tile that sees a query block by the mask of traits alone.
    if constexpr (trims_tiles<typename Kernel::Mod, false>() && !Kernel::keeps_dq) {
        const Range blocks = trimmed_query_tiles<typename Kernel::Mod, Kernel::B_r>(
            mod_of<typename Kernel::Mod>(args), {item.first_block, item.end_block},
            {first_key, min(first_key + Kernel::B_c, item.seq_len_k)}, item.seq_len_q, item.batch);
        item.first_block = blocks.begin;
        item.end_block = blocks.end;
    }
    item.n_steps = item.visited_blocks() * args.group;
}

// Which item a number is, for Scheduler. With varlen the items of one sequence come before those of the next.
template <typename Kernel>
struct KeyItems {
    SequenceGroups groups;  // varlen

    FLASH_DEVICE bool has(const BackwardKernelArgs &args, int number) {
        if constexpr (!Kernel::traits.varlen) return number < args.n_items;
        return groups.advance_to(
            args.batch, number, [&](int sequence) { return owned_keys(args, sequence).n_rows; },
            [&](int n_rows) { return tiles_of_sequence(n_rows) * args.n_heads_kv; });
    }

    FLASH_DEVICE BackwardItem item(const BackwardKernelArgs &args, int number) const {
        BackwardItem item;
        if constexpr (Kernel::traits.varlen) {
            const auto [sequence, in_sequence] = groups.place(number);
            const SequenceRows keys = owned_keys(args, sequence);
            const SequenceRows queries =
                sequence_rows(args.cu_seqlens_q, args.seqused_q, args.seq_len_q, args.rows_q, sequence);
            item = place_of(in_sequence, tiles_of_sequence(keys.n_rows), args.n_heads_kv, args);
            item.batch = sequence;
            item.seq_len_q = queries.n_rows;
            item.q_row = queries.first_row;
            item.owned_rows = keys.n_rows;
            item.k_row = keys.first_row;
            const int used = args.seqused_k != nullptr ? args.seqused_k[sequence] : keys.n_rows;
            item.seq_len_k = max_of(0, min_of(used, keys.n_rows));
            item.first_dq_tile = args.cu_seqlens_q != nullptr
                                     ? queries.first_row / kMmaM + sequence
                                     : sequence * args.group * args.n_heads_kv * args.dq_tiles;
        } else {
            item = place_of(number, args.n_tiles, args.batch * args.n_heads_kv, args);
            item.seq_len_q = args.seq_len_q;
            item.seq_len_k = item.owned_rows = args.seq_len_k;
            item.first_dq_tile = item.batch * args.group * args.n_heads_kv * args.dq_tiles;
        }
        set_query_blocks<Kernel>(args, item);
        return item;
    }

  private:
    // That are numbered: with keeps_dq the first stands for all.
    static FLASH_DEVICE int tiles_of_sequence(int n_rows) {
        return Kernel::keeps_dq ? min_of(n_rows, 1) : ceil_div(n_rows, Kernel::B_c);
    }

    static FLASH_DEVICE BackwardItem place_of(int number, int n_tiles, int pairs,
                                              const BackwardKernelArgs &args) {
        const ItemPlace place = ordered_item(number, n_tiles, pairs, args.section_heads);
        const int pair = Kernel::cfg.reversed_heads ? pairs - 1 - place.pair : place.pair;
        BackwardItem item{};
        item.tile = place.tile;
        item.batch = pair / args.n_heads_kv;
        item.head = pair - item.batch * args.n_heads_kv;
        return item;
    }

    static FLASH_DEVICE SequenceRows owned_keys(const BackwardKernelArgs &args, int sequence) {
        return sequence_rows(args.cu_seqlens_k, nullptr, args.seq_len_k, args.rows_k, sequence);
    }
};

}  // namespace flash::hopper
