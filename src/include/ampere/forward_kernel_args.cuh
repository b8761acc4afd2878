// What a launch tells every thread block. What belongs to a trait is read only by kernels that have it;
// it stands last, so that plain kernels do not change with it.
#pragma once

#include "block_coordinates.cuh"
#include "flash_attention.cuh"
#include "softmax_scale.cuh"

namespace flash::ampere {

struct ForwardKernelArgs {
    const void *Q;  // (batch, seq_len_q, n_heads, d_head)
    const void *K;  // (batch, seq_len_k, n_heads_kv, d_head)
    const void *V;  // (batch, seq_len_k, n_heads_kv, d_head_v)
    void *O;        // (batch, seq_len_q, n_heads, d_head_v)
    float *lse;     // (batch, n_heads, seq_len_q) or nullptr
    TensorStrides Q_strides, K_strides, V_strides, O_strides;
    GridShape grid;
    int heads_per_kv_head;
    int seq_len_q, seq_len_k;
    SoftmaxScale scale;

    int window_left, window_right;                       // window
    const float *sinks;                                  // sinks: (n_heads)
    const int *cu_seqlens_q, *cu_seqlens_k, *seqused_k;  // varlen
    int64_t total_q;                                     // varlen: rows of lse where cu_seqlens_q is given
    int n_splits;                                        // split
    float *partial_O;      // split: (n_splits, batch, n_heads, seq_len_q, d_head_v)
    float *partial_lse;    // split: (n_splits, batch, n_heads, seq_len_q)
    int d_head, d_head_v;  // padded_head: of the tensors
};

}  // namespace flash::ampere
