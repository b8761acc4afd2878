// How many heads a section of the work has (work_items.cuh).
//
// Measured on an H100 80GB HBM3, bf16, 16384 tokens, hidden size 2048.
#pragma once

#include <cstdint>

namespace flash::hopper {

// Not causal: K and V of a section take 8 KiB a key at most. Wider sections start many heads at once, whose
// first reads come in bursts that DRAM cannot serve (-21 % at 512 keys); narrower ones change nothing. From
// 4096 keys on, what counts is that a section fits the L2 cache.
inline constexpr int64_t kSectionBytesPerKey = 8 * 1024;
inline constexpr int64_t kSectionBytes = 32 * 1024 * 1024;
// Causal: wide sections, whatever the cache: short items of many heads fill the end of each section. Sixteen
// heads from 4096 queries on (+4 % over 32; 4090 are as many blocks and tiles, and gain 2 % by 8 heads on an
// H200, benchmarks/results/h200-row-candidates.json), and never more than 32: two blocks a head or fewer
// leave K and V to be read from DRAM (-4 ... -21 % with 64 heads, up to 2048 keys).
inline constexpr int kCausalSectionHeads = 32;
inline constexpr int kLongCausalSectionHeads = 16;
inline constexpr int kLongCausalQueries = 4096;  // rounded up to blocks of 128

// key_bytes: of one key and its value.
constexpr int section_width(bool causal, int seq_len_q, int seq_len_k, int key_bytes) {
    if (causal) return seq_len_q > kLongCausalQueries - 128 ? kLongCausalSectionHeads : kCausalSectionHeads;
    const int64_t head_bytes = int64_t{seq_len_k} * key_bytes;
    const int64_t by_key = seq_len_k * kSectionBytesPerKey;
    const int64_t budget = by_key < kSectionBytes ? by_key : kSectionBytes;
    int heads = 1;
    while (head_bytes > 0 && heads * 2 * head_bytes <= budget) heads *= 2;
    return heads;
}

}  // namespace flash::hopper
