// What a launch tells every thread block, and what part of the work a block finds for itself by it.
#pragma once

#include "ampere/forward/block_coordinates.cuh"
#include "common/mod.cuh"
#include "common/page_table.cuh"
#include "common/planned_output.cuh"
#include "common/scheduler_counter.cuh"
#include "common/sequence_rows.cuh"
#include "common/softmax_scale.cuh"
#include "flash_attention.cuh"

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

    // What belongs to a trait; read only by kernels that have it.
    int window_left, window_right;                       // window
    const float *sinks;                                  // sinks: (n_heads)
    const int *cu_seqlens_q, *cu_seqlens_k, *seqused_k;  // varlen
    int64_t total_q;            // varlen: rows of q, o and lse where cu_seqlens_q is given
    int rows_q, rows_k;         // varlen: nameable_rows of q and k, where their offsets are given
    int n_splits;               // split
    float *partial_o;           // split: (n_splits, batch, n_heads, seq_len_q, d_head_v)
    float *partial_lse;         // split: (n_splits, batch, n_heads, seq_len_q)
    int d_head, d_head_v;       // padded_head: of the tensors
    const int *block_table;     // paged: (batch, max_pages)
    int max_pages;              // paged
    int n_pages;                // paged: of K and V
    PageSize page_size;         // paged
    PlannedLaunch planned;      // planned
    PlannedOutput output;       // planned
    SchedulerCounter *counter;  // planned, chunks; nullptr: items go round statically
    float *kept_sums;           // chunks: see kept_rows.cuh
};

template <typename Mod>
using KernelArgs = ArgsFor<ForwardKernelArgs, Mod>;

struct Place {
    int part;  // of the keys
    int batch;
    int head;
    int q_block;
    SequenceRows q_seq;
    SequenceRows k_seq;
};

// Consecutive thread blocks work on one part of the keys.
template <typename Kernel>
FLASH_DEVICE Place find_place(const ForwardKernelArgs &args, int block_index) {
    constexpr ForwardTraits TRAITS = Kernel::traits;
    // A head's later Q blocks have more work, or may have.
    constexpr bool longest_first = TRAITS.causal || TRAITS.window || Kernel::mod_hides_keys;
    int part = 0;
    if constexpr (TRAITS.split) {
        const int part_blocks = args.grid.n_q_blocks * args.grid.total_heads;
        part = block_index / part_blocks;
        block_index -= part * part_blocks;
    }
    const auto [batch, head, q_block] = args.grid.decode<longest_first>(block_index);
    if constexpr (TRAITS.varlen) {
        return {part,
                batch,
                head,
                q_block,
                sequence_rows(args.cu_seqlens_q, nullptr, args.seq_len_q, args.rows_q, batch),
                sequence_rows(args.cu_seqlens_k, args.seqused_k, args.seq_len_k, args.rows_k, batch)};
    } else {
        return {part, batch, head, q_block, {batch, 0, args.seq_len_q}, {batch, 0, args.seq_len_k}};
    }
}

}  // namespace flash::ampere
