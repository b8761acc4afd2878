// What a launch tells every thread block, and what part of the work a block finds for itself by it.
#pragma once

#include "ampere/backward/static_kernel_configuration.cuh"
#include "ampere/forward/block_coordinates.cuh"
#include "common/backward/dq_sums.cuh"
#include "common/backward/visible_rows.cuh"
#include "common/sequence_rows.cuh"

namespace flash::ampere {

struct BackwardKernelArgs {
    const void *Q, *K, *V, *dO;
    void *dQ, *dK, *dV;             // nullptr: not wanted
    const float *lse_log2, *delta;  // (batch, n_heads, seq_len_q), or packed (n_heads, total_q)
    float *dQ_sums;                 // dq_sums.cuh
    // dQ's in words of 16 bits, of which an element may have two.
    TensorStrides Q_strides, K_strides, V_strides, dO_strides, dQ_strides, dK_strides, dV_strides;
    RowTiles sum_tiles;
    GridShape grid;        // of blocks of keys and heads of K and V
    GridShape query_grid;  // of blocks of queries and their heads, likewise
    int n_heads;
    int heads_per_kv_head;
    int seq_len_q, seq_len_k;
    float score_factor;     // of the exponents of 2, or with softcap of what tanh is taken of
    float exponent_factor;  // with softcap: of tanh
    float hidden_score;     // what makes P exactly 0
    float softmax_scale;    // of dK

    int window_left, window_right;                                   // window
    const int *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;  // varlen
    int64_t total_q, total_k;                                        // varlen
    int rows_q, rows_k;                                              // varlen
    int d_head, d_head_v;                                            // padded_head
};

template <typename Mod>
using BackwardArgs = ArgsFor<BackwardKernelArgs, Mod>;

struct BackwardPlace {
    int batch;
    int kv_head;
    int k_block;
    SequenceRows q_seq;
    SequenceRows k_seq;
    int owned_keys;  // rows of k that are the sequence's, used or not
};

// Under a mask, a head's first keys are seen by the most queries: they come first. With ordered sums, too,
// blocks of several heads start in turn, so that not all of those that run at once wait for one another.
template <typename Kernel>
FLASH_DEVICE BackwardPlace find_backward_place(const BackwardKernelArgs &args, int block_index) {
    constexpr BackwardTraits TRAITS = Kernel::traits;
    constexpr bool in_turn = TRAITS.causal || TRAITS.window || Kernel::cfg.dq_sum == DQSum::ORDERED;
    const auto [batch, head, block] = args.grid.decode<in_turn>(block_index);
    const int k_block = in_turn ? args.grid.n_q_blocks - 1 - block : block;
    if constexpr (TRAITS.varlen) {
        return {batch,
                head,
                k_block,
                sequence_rows(args.cu_seqlens_q, args.seqused_q, args.seq_len_q, args.rows_q, batch),
                sequence_rows(args.cu_seqlens_k, args.seqused_k, args.seq_len_k, args.rows_k, batch),
                sequence_rows(args.cu_seqlens_k, nullptr, args.seq_len_k, args.rows_k, batch).n_rows};
    } else {
        return {batch, head, k_block, {batch, 0, args.seq_len_q}, {batch, 0, args.seq_len_k}, args.seq_len_k};
    }
}

}  // namespace flash::ampere
