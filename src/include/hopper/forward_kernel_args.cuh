// The kernel's arguments beside the tensor maps. Strides are in elements.
#pragma once

#include "flash_attention.cuh"
#include "hopper/work_items.cuh"

namespace flash::hopper {

// Items handed out, and blocks that have seen the end. Both are zero before and after a launch.
struct SchedulerCounter {
    int next;
    int finished_blocks;
};

struct ForwardKernelArgs {
    void *o;                    // (batch, seq_len_q, n_heads, d_head_v)
    float *lse;                 // (batch, n_heads, seq_len_q), or nullptr
    SchedulerCounter *counter;  // nullptr: items go round statically
    TensorStrides o_strides;
    WorkShape work;
    int group_size;        // query heads that share a key and value head
    float scale_log2;      // softmax_scale * log2(e)
    float inv_scale_log2;  // 1 / scale_log2
};

}  // namespace flash::hopper
