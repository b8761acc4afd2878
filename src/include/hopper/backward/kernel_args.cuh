// The kernel's arguments beside the tensor maps. Strides are in elements.
#pragma once

#include "backward.cuh"
#include "common/backward/dq_sums.cuh"
#include "common/backward/modified_score.cuh"
#include "common/backward/visible_rows.cuh"
#include "common/scheduler_counter.cuh"
#include "common/sequence_rows.cuh"
#include "tma/rings.cuh"

namespace flash::hopper {

struct BackwardKernelArgs {
    const float *lse, *delta;  // (batch, n_heads, seq_len_q), or packed (n_heads, total_q)
    float *dq_sums;            // in tiles of 16 rows (common/backward/dq_sums.cuh), or as kept_sums.cuh says
    void *dk, *dv;
    TensorStrides dk_strides, dv_strides;
    // Of dQ's own kernel, and dq also where the main kernel rounds it.
    const void *o;
    const float *dlse;  // nullptr: none
    float *written_delta;
    void *dq;
    TensorStrides o_strides, dq_strides;
    SchedulerCounter *counter;  // nullptr: items go round statically
    int seq_len_q, seq_len_k;   // of the longest sequence
    int n_heads_kv, group;      // key heads; query heads of each
    int batch;
    int n_tiles;            // of a sequence; not with varlen
    int n_items;            // not with varlen
    int section_heads;      // (batch, key head) pairs that are worked on together
    int dq_tiles;           // of dq_sums, of a head
    float score_factor;     // softcap: scores become tanh(score_factor S)
    float exponent_factor;  // of the scores, or of their tanh: P = 2^(factor S - LSE log2e)
    float softmax_scale;
    int zero;  // 0, of which the compiler knows nothing

    int window_left, window_right;
    const int *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;
    int64_t total_q, total_k;
    int rows_q, rows_k;    // nameable_rows of q and k
    int d_head, d_head_v;  // padded_head: of the tensors

    FLASH_DEVICE int n_heads() const { return n_heads_kv * group; }

    // A score whose P is 0. Scales may be below 0.
    FLASH_DEVICE float hidden_score() const { return exponent_factor < 0.f ? INFINITY : -INFINITY; }

    // Who sees whom in a sequence of these lengths.
    template <BackwardTraits TRAITS>
    FLASH_DEVICE VisibleRows<TRAITS> visible(int n_queries, int n_keys) const {
        return {n_queries, n_keys, window_left, window_right};
    }
};

template <typename Mod>
using BackwardArgs = ArgsFor<BackwardKernelArgs, Mod>;

}  // namespace flash::hopper
