// What the binding, the kernel libraries and the kernels of the backward direction agree on, beside
// flash_attention.cuh: the problem that one call states, the workspaces that a launch needs, and the record.
#pragma once

#include "flash_attention.cuh"

namespace flash {

// One backward call on raw device pointers. What has the name of a member of ForwardProblem means the same.
// Rows and keys that nobody sees get gradients of exactly 0, rows of q before the first offset and behind the
// last, and rows of k and v that no sequence owns, too; every element of a wanted gradient is written.
struct BackwardProblem {
    const void *q, *k, *v;
    const void *o;       // of the forward pass, (batch, seq_len_q, n_heads, d_head_v)
    const void *dout;    // gradient of o, likewise
    const float *lse;    // of the forward pass, (batch, n_heads, seq_len_q), natural log, contiguous
    const float *dlse;   // gradient of lse, likewise; nullptr: none
    void *dq, *dk, *dv;  // like q, k, v; nullptr: not wanted
    TensorStrides q_strides, k_strides, v_strides, o_strides, dout_strides, dq_strides, dk_strides,
        dv_strides;
    int batch, n_heads, n_heads_kv;
    int seq_len_q, seq_len_k;
    int d_head, d_head_v;
    float softmax_scale;

    // window; limits of either sign
    int window_left, window_right;
    // softcap
    float softcap;
    // varlen
    const int *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;
    int64_t total_q, total_k;
    // a mod
    const ModArguments *mod;

    // Workspaces, aligned to 256 bytes. delta: rowsum(o * dout) - dlse, float32, laid out as lse; written,
    // for rows without a visible key too (0 where lse is -inf): the host makes dSinks of it. The others have
    // the sizes that BackwardWorkspaces says, nullptr where that is 0, and a layout of the kernel's own.
    // dq_sums: float32 sums of dQ. lse_log2: the LSE in powers of 2, and what else there is of a row.
    // counters: int32, for orders and schedules. What they hold at first is undefined: the launcher clears
    // what has to be 0, in stream order, in each call.
    float *delta, *lse_log2, *dq_sums;
    int *counters;
};

// Bytes of the workspaces that one launch needs beside delta.
struct BackwardWorkspaces {
    int64_t lse_log2 = 0, dq_sums = 0, counters = 0;
};

// A compiled backward kernel, as its library presents it: see ForwardKernelRecord. `launch` launches all
// kernels of the pass, in stream order. `workspaces` looks at sizes alone, not at pointers, but for whether
// those of dq, dk, dv and of the offsets of packed sequences are nullptr.
template <typename Config>
struct BackwardKernelRecord {
    Config config;
    BackwardTraits traits;
    int target;  // 80 for sm_80
    int n_threads;
    int smem_bytes;  // dynamic
    int (*load)();
    int (*launch)(const BackwardProblem &problem, void *stream);
    int (*attributes)(KernelAttributes &out);
    BackwardWorkspaces (*workspaces)(const BackwardProblem &problem);
    ModSignature mod{};
};

}  // namespace flash
