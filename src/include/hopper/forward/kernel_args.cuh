// The kernel's arguments beside the tensor maps. Strides are in elements.
#pragma once

#include <type_traits>

#include "common/mod.cuh"
#include "common/page_table.cuh"
#include "common/planned_output.cuh"
#include "common/scheduler_counter.cuh"
#include "common/sequence_rows.cuh"
#include "common/softcap.cuh"
#include "flash_attention.cuh"
#include "tma/work_items.cuh"

namespace flash::hopper {

using namespace flash::tma;

struct ForwardKernelArgs {
    void *o;                    // (batch, seq_len_q, n_heads, d_head_v)
    float *lse;                 // (batch, n_heads, seq_len_q), or nullptr
    SchedulerCounter *counter;  // nullptr: items go round statically
    TensorStrides o_strides;
    WorkShape work;
    int heads_per_kv_head;      // query heads that share a key and value head
    float exponent_factor;      // of the scores (SoftmaxScale): softmax_scale * log2(e)
    float inv_exponent_factor;  // 1 / exponent_factor
    float lowest;               // the reference of a row without a finite score (SoftmaxScale)

    // What belongs to a trait is read only by kernels that have it, and stands last: the others do not change
    // with it.
    int window_left, window_right;
    float score_factor;  // softcap: scores become tanh(score_factor S); begun scores: 1 / softmax_scale
    const float *sinks;  // (n_heads)
    const int *cu_seqlens_q, *cu_seqlens_k, *seqused_k;  // varlen
    int64_t total_q;         // varlen: rows of q, o and lse where cu_seqlens_q is given
    int batch;               // varlen, split
    int n_splits;            // split
    float *partial_o;        // split: (n_splits, batch, n_heads, seq_len_q, d_head_v)
    float *partial_lse;      // split: (n_splits, batch, n_heads, seq_len_q); chunks: pairs of floats
    int d_head_v;            // padded_head: of the tensors
    int rows_q, rows_k;      // varlen: nameable_rows of q and k, where their offsets are given
    const int *block_table;  // paged: (batch, max_pages)
    int max_pages, n_pages;  // paged
    int box_rows;            // paged: of a page and of a tile that one copy takes
    PageSize page_size;      // paged
    PlannedLaunch planned;   // planned
    PlannedOutput output;    // planned
    // softcap: the exponent of a score S that is small, or not large
    TanhSeries<3> short_cap_series;
    TanhSeries<7> long_cap_series;
    float *kept_sums;  // chunks: see chunk_sums.cuh

    // The mask of a launch; of one sequence of it, where lengths differ.
    template <ForwardTraits TRAITS>
    FLASH_DEVICE Mask<TRAITS> mask(int seq_len_q, int seq_len_k) const {
        return {seq_len_q, seq_len_k, window_left, window_right};
    }
};

// What is known of an item.
template <typename Kernel>
using ItemOf = std::conditional_t<Kernel::traits.planned, PlannedItem, WorkItem>;

template <typename Mod>
using KernelArgs = ArgsFor<ForwardKernelArgs, Mod>;

// Where an item's queries are in q, o and lse, and how many its sequence has.
template <ForwardTraits TRAITS>
FLASH_DEVICE SequenceRows query_rows(const ForwardKernelArgs &args, const WorkItem &item) {
    if constexpr (!TRAITS.varlen) return {item.batch, 0, args.work.seq_len_q};
    return {args.cu_seqlens_q != nullptr ? 0 : item.batch, item.q_row, item.seq_len_q};
}

// The index in lse of the first of these rows.
template <ForwardTraits TRAITS>
FLASH_DEVICE int64_t lse_index(const ForwardKernelArgs &args, const SequenceRows &rows, int head) {
    return lse_begin(TRAITS.varlen && args.cu_seqlens_q != nullptr, rows, args.work.n_heads, head,
                     args.work.seq_len_q, args.total_q);
}

// The index in partial_lse of an item's first row, and of its first row in partial_o.
FLASH_DEVICE int64_t partial_row(const ForwardKernelArgs &args, const WorkItem &item) {
    const int64_t pair = (static_cast<int64_t>(item.part) * args.batch + item.batch) * args.work.n_heads;
    return (pair + item.head) * args.work.seq_len_q;
}

}  // namespace flash::hopper
