// The kernel's arguments beside the tensor maps. Strides are in elements.
#pragma once

#include <cstdint>

#include "flash_attention.cuh"

namespace flash::hopper {

// Work items handed out, and blocks that have seen the end. Both zero before and after a launch.
struct SchedulerCounter {
    int next;
    int finished_blocks;
};

struct ForwardKernelArgs {
    void *o;                    // (batch, seq_len_q, n_heads, d_head_v)
    float *lse;                 // (batch, n_heads, seq_len_q), or nullptr
    SchedulerCounter *counter;  // nullptr: items go round statically
    TensorStrides o_strides;
    int seq_len_q, seq_len_k;
    int n_heads;           // query heads
    int group_size;        // query heads that share a key and value head
    int n_head_pairs;      // batch * n_heads
    int first_q_block;     // the query blocks before it see no key at all
    int n_q_blocks;        // query blocks with work, from first_q_block on
    int n_items;           // n_q_blocks * n_head_pairs
    int section_heads;     // (batch, head) pairs that are worked on together
    float scale_log2;      // softmax_scale * log2(e)
    float inv_scale_log2;  // 1 / scale_log2
};

}  // namespace flash::hopper
