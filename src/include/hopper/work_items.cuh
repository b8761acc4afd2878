// The work of a launch, cut into items and put in order. Plain arithmetic, the same on host and device.
//
// An item is one query block of one (batch, head) pair. Items are numbered so that
//   - pairs are taken in sections of `section_heads`: a section's K and V stay in the L2 cache while all its
//     query blocks pass over them;
//   - inside a section the query blocks go from last to first, so that under a causal mask the longest items
//     start first and the short ones fill the end;
//   - of one query block, the heads of the section come one after another.
//
// Query blocks whose rows see no key at all are no items: under a causal mask those before first_q_block,
// without any keys all of them.
#pragma once

#include <cstdint>

#include "flash_attention.cuh"
#include "hopper/layout.cuh"

namespace flash::hopper {

struct WorkShape {
    int seq_len_q, seq_len_k;
    int n_heads;        // query heads
    int n_head_pairs;   // batch * n_heads
    int first_q_block;  // the query blocks before it see no key
    int n_q_blocks;     // query blocks with work, from first_q_block on
    int n_items;        // n_q_blocks * n_head_pairs
    int section_heads;  // (batch, head) pairs that are worked on together
};

// Which rows of which head a block works on next, and over how many tiles of keys.
struct WorkItem {
    int q_block;
    int head;  // query head
    int batch;
    int n_kv_blocks;  // at least 1; kNoMoreItems: there is no further item
};
inline constexpr int kNoMoreItems = -1;

FLASH_HOST_DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }
FLASH_HOST_DEVICE constexpr int blocks_of(int n, int block) { return (n + block - 1) / block; }

// Item `number` of 0 ... n_items - 1.
template <int B_r, int B_c, bool kCausal>
FLASH_HOST_DEVICE constexpr WorkItem work_item(const WorkShape &shape, int number) {
    const int items_per_section = shape.section_heads * shape.n_q_blocks;
    const int section = number / items_per_section;
    const int in_section = number - section * items_per_section;
    const int first_pair = section * shape.section_heads;
    const int heads = smaller(shape.section_heads, shape.n_head_pairs - first_pair);
    const int step = in_section / heads;
    const int pair = first_pair + (in_section - step * heads);

    WorkItem item{};
    item.q_block = shape.first_q_block + shape.n_q_blocks - 1 - step;
    item.batch = pair / shape.n_heads;
    item.head = pair - item.batch * shape.n_heads;
    item.n_kv_blocks = blocks_of(shape.seq_len_k, B_c);
    if (kCausal) {  // the last row of the block sees the most keys
        const int visible = (item.q_block + 1) * B_r + shape.seq_len_k - shape.seq_len_q;
        item.n_kv_blocks = smaller(item.n_kv_blocks, blocks_of(visible, B_c));
    }
    return item;
}

// ---------------------------------------------------------------- section width
// Measured on an H100 80GB HBM3, bf16, 16384 tokens, hidden size 2048.
//
// Not causal: K and V of a section take 8 KiB a key at most. Wider sections start many heads at once, whose
// first reads come in bursts that DRAM cannot serve (-21 % at 512 keys); narrower ones change nothing. From
// 4096 keys on, what counts is that a section fits the L2 cache.
inline constexpr int64_t kSectionBytesPerKey = 8 * 1024;
inline constexpr int64_t kSectionBytes = 32 * 1024 * 1024;
// Causal: wide sections, whatever the cache: short items of many heads fill the end of each section. Sixteen
// heads from 4096 queries on (+4 % over 32), and never more than 32: two blocks a head or fewer leave K and V
// to be read from DRAM (-4 ... -21 % with 64 heads, up to 2048 keys).
inline constexpr int kCausalSectionHeads = 32;
inline constexpr int kLongCausalSectionHeads = 16;
inline constexpr int kLongCausalQueries = 4096;

// key_bytes: of one key and its value.
constexpr int section_width(bool causal, int seq_len_q, int seq_len_k, int key_bytes) {
    if (causal) return seq_len_q >= kLongCausalQueries ? kLongCausalSectionHeads : kCausalSectionHeads;
    const int64_t head_bytes = int64_t{seq_len_k} * key_bytes;
    const int64_t by_key = seq_len_k * kSectionBytesPerKey;
    const int64_t budget = by_key < kSectionBytes ? by_key : kSectionBytes;
    int heads = 1;
    while (head_bytes > 0 && heads * 2 * head_bytes <= budget) heads *= 2;
    return heads;
}

// The largest number of items and of (batch, head) pairs; the counters' room beyond it is for one number more
// a block.
inline constexpr int64_t kMaxItems = INT32_MAX - 65536;
inline constexpr int kMaxSeqLen = 1 << 30;  // row numbers and their sums stay in 32 bits

// Fills in the shape of a launch. False: it is too large (kMaxItems, kMaxSeqLen).
constexpr bool plan_work(int batch, int n_heads, int seq_len_q, int seq_len_k, int B_r, bool causal,
                         int section_heads, WorkShape &shape) {
    const int64_t pairs = int64_t{batch} * n_heads;
    if (seq_len_q > kMaxSeqLen || seq_len_k > kMaxSeqLen || pairs > kMaxItems) return false;
    const int q_blocks = blocks_of(seq_len_q, B_r);
    shape.seq_len_q = seq_len_q;
    shape.seq_len_k = seq_len_k;
    shape.n_heads = n_heads;
    shape.n_head_pairs = static_cast<int>(pairs);
    shape.first_q_block = causal && seq_len_q > seq_len_k ? (seq_len_q - seq_len_k) / B_r : 0;
    if (seq_len_k == 0) shape.first_q_block = q_blocks;
    shape.n_q_blocks = q_blocks - shape.first_q_block;
    if (pairs * shape.n_q_blocks > kMaxItems) return false;
    shape.n_items = shape.n_head_pairs * shape.n_q_blocks;
    shape.section_heads = smaller(section_heads, shape.n_head_pairs);
    return true;
}

}  // namespace flash::hopper
