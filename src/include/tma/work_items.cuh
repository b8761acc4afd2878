// The work of a launch, cut into items and put in order. Plain arithmetic, the same on host and device.
//
// An item is one query block of one (batch, head) pair and the tiles of keys it visits; with split keys, one
// part of them. Items are numbered so that
//   - pairs are taken in sections of `section_heads`: a section's K and V stay in the L2 cache while all its
//     query blocks pass over them;
//   - inside a section the query blocks go from last to first, so that under a causal mask the longest items
//     start first and the short ones fill the end;
//   - of one query block, the heads of the section come one after another, each with all its parts.
//
// Query blocks whose rows see no key at all are no items, if they come first: those before first_q_block
// (causal masks and windows), without any keys all of them. With split keys, and with sequences of different
// lengths, they are items without tiles. Others, whose windows lie behind the last key, visit one tile and
// see nothing of it.
#pragma once

#include <cstdint>

#include "common/mask.cuh"
#include "flash_attention.cuh"

namespace flash::tma {

struct WorkShape {
    int seq_len_q, seq_len_k;
    int n_heads;        // query heads
    int total_heads;    // batch * n_heads
    int first_q_block;  // the query blocks before it see no key
    int n_q_blocks;     // query blocks with work, from first_q_block on
    int n_items;        // n_q_blocks * total_heads * parts
    int section_heads;  // (batch, head) pairs that are worked on together
};

// Which rows of which head a block works on next, and over which tiles of keys.
struct WorkItem {
    int q_block;
    int head;  // query head
    int batch;
    int end_kv_block;  // its tiles are first_kv_block ... end_kv_block - 1; kNoMoreItems: there is no item
    int first_kv_block;
    int part;  // of the keys
    // varlen: the sequence's own lengths, and where its rows begin (SequenceRows)
    int seq_len_q, seq_len_k;
    int q_row, k_row;

    FLASH_HOST_DEVICE constexpr bool has_tiles() const { return first_kv_block < end_kv_block; }
};
inline constexpr int kNoMoreItems = -1;

// Query block, head and batch item of item `number`, in 0 ... n_items / parts - 1.
FLASH_HOST_DEVICE constexpr WorkItem ordered_item(const WorkShape &shape, int number) {
    const int items_per_section = shape.section_heads * shape.n_q_blocks;
    const int section = number / items_per_section;
    const int in_section = number - section * items_per_section;
    const int first_head = section * shape.section_heads;
    const int heads = min_of(shape.section_heads, shape.total_heads - first_head);
    const int step = in_section / heads;
    const int batch_head = first_head + (in_section - step * heads);

    WorkItem item{};
    item.q_block = shape.first_q_block + shape.n_q_blocks - 1 - step;
    item.batch = batch_head / shape.n_heads;
    item.head = batch_head - item.batch * shape.n_heads;
    return item;
}

// The tiles of B_c keys that query block item.q_block of B_r rows visits; with split keys, those of part
// item.part. Where kChunkTiles is not 0, parts are chunks of so many tiles (KeyBlocks::chunk_part).
template <int B_r, int B_c, int kChunkTiles = 0, ForwardTraits TRAITS>
FLASH_HOST_DEVICE constexpr void set_tiles(WorkItem &item, const Mask<TRAITS> &mask, int n_splits) {
    KeyBlocks blocks = mask.key_blocks(item.q_block * B_r, item.q_block * B_r + B_r - 1, B_c);
    if constexpr (TRAITS.split && kChunkTiles > 0) {
        blocks =
            blocks.chunk_part(item.part, n_splits, kChunkTiles, ceil_div(mask.seq_len_k, kChunkTiles * B_c));
    } else if (TRAITS.split) {
        blocks = blocks.part(item.part, n_splits);
    }
    if (TRAITS.window && !TRAITS.split && !TRAITS.varlen) blocks.begin = min_of(blocks.begin, blocks.end - 1);
    item.first_kv_block = blocks.begin;
    item.end_kv_block = blocks.end;
}

// Item `number` of 0 ... n_items - 1, of sequences of one length.
template <int B_r, int B_c, int kChunkTiles = 0, ForwardTraits TRAITS>
FLASH_HOST_DEVICE constexpr WorkItem work_item(const WorkShape &shape, const Mask<TRAITS> &mask, int n_splits,
                                               int number) {
    const int pair_number = TRAITS.split ? number / n_splits : number;
    WorkItem item = ordered_item(shape, pair_number);
    item.part = number - pair_number * n_splits;
    set_tiles<B_r, B_c, kChunkTiles>(item, mask, n_splits);
    return item;
}

// Heads of a section where `heads` are cut into as few sections as `most` allows, all about as wide. A narrow
// last section costs time: on an H200, causal, 20 heads of 8192 queries in 10 and 10 are +13 % over 16 and 4,
// 40 heads of 4096 in 14, 14 and 12 +4 % over 16, 16 and 8 (d 192, benchmarks/results/h200-sections.json).
constexpr int balanced_section(int heads, int most) {
    return heads < 1 ? 0 : ceil_div(heads, ceil_div(heads, most));
}

// The largest number of items and of (batch, head) pairs; the counters' room beyond it is for one number more
// a block.
inline constexpr int64_t kMaxItems = INT32_MAX - 65536;
inline constexpr int kMaxSeqLen = 1 << 30;  // row numbers and their sums stay in 32 bits

// The first queries, as far as their keys would end before the first one.
template <ForwardTraits TRAITS>
constexpr int rows_without_keys(const Mask<TRAITS> &mask) {
    if (mask.seq_len_k == 0) return mask.seq_len_q;
    if (!TRAITS.causal && !TRAITS.window) return 0;
    return max_of(0, min_of(mask.seq_len_q, mask.seq_len_q - mask.seq_len_k - mask.right()));
}

// Fills in the shape of a launch over `batch` sequences of at most mask.seq_len_q queries and mask.seq_len_k
// keys, with at most `section_heads` heads a section. False: it is too large (kMaxItems, kMaxSeqLen).
template <ForwardTraits TRAITS>
constexpr bool plan_work(int batch, int n_heads, const Mask<TRAITS> &mask, int B_r, int section_heads,
                         int n_splits, WorkShape &shape) {
    const int64_t pairs = int64_t{batch} * n_heads;
    if (mask.seq_len_q > kMaxSeqLen || mask.seq_len_k > kMaxSeqLen || pairs > kMaxItems) return false;
    const int q_blocks = ceil_div(mask.seq_len_q, B_r);
    shape.seq_len_q = mask.seq_len_q;
    shape.seq_len_k = mask.seq_len_k;
    shape.n_heads = n_heads;
    shape.total_heads = static_cast<int>(pairs);
    const int empty_rows = TRAITS.varlen || TRAITS.split ? 0 : rows_without_keys(mask);
    shape.first_q_block = empty_rows == mask.seq_len_q ? q_blocks : empty_rows / B_r;
    shape.n_q_blocks = q_blocks - shape.first_q_block;
    const int64_t items = pairs * shape.n_q_blocks * (TRAITS.split ? n_splits : 1);
    if (pairs * shape.n_q_blocks > kMaxItems || items > kMaxItems) return false;
    shape.n_items = static_cast<int>(items);
    // With sequences of their own lengths the items of one come before those of the next.
    shape.section_heads = balanced_section(TRAITS.varlen ? n_heads : shape.total_heads, section_heads);
    return true;
}

}  // namespace flash::tma
