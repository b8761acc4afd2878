// The work of a launch, cut into items, and how they are handed on.
//
// An item is a tile of one (batch, head) pair and the blocks of the other side that it visits: of dK and dV
// keys and the query blocks that see some of them (key_items.cuh), of dQ queries and the tiles of keys that
// they see (query_items.cuh).
#pragma once

#include "common/ptx.cuh"
#include "hopper/backward/item_order.cuh"
#include "hopper/backward/kernel_args.cuh"
#include "tma/sequence_finder.cuh"

namespace flash::hopper {

using namespace flash::tma;

struct BackwardItem {
    int tile, head, batch;
    int n_steps;  // kEndOfItems: there is no item
    int first_block, end_block;
    // The sequence's own lengths; varlen: where its rows begin, and how many rows of the gradient it owns.
    int seq_len_q, seq_len_k;
    int q_row, k_row, owned_rows;
    int first_dq_tile;  // of 16 rows in dq_sums: the first of the sequence and head 0

    FLASH_DEVICE int visited_blocks() const { return end_block - first_block; }
};
inline constexpr int kEndOfItems = -1;
inline constexpr int kItemBytes = 48;
inline constexpr int kItemStepsOffset = 12;  // of n_steps

FLASH_DEVICE void write_item(uint32_t address, const BackwardItem &item) {
    store_shared(address, make_int4(item.tile, item.head, item.batch, item.n_steps));
    store_shared(address + 16, make_int4(item.first_block, item.end_block, item.seq_len_q, item.seq_len_k));
    store_shared(address + 32, make_int4(item.q_row, item.k_row, item.owned_rows, item.first_dq_tile));
}

FLASH_DEVICE BackwardItem read_item(uint32_t address) {
    const int4 a = load_shared_int4(address), b = load_shared_int4(address + 16),
               c = load_shared_int4(address + 32);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, c.w};
}

}  // namespace flash::hopper
