// What the binding, the kernel libraries and the kernels agree on: configurations, traits, the
// problem one call states, and the record by which a compiled kernel makes itself known.
//
// Host and device code of every family includes this file; it knows neither torch nor CUDA, so a
// plain C++ compiler builds the binding. Kernel libraries are shared objects that export
// `flash_attention_kernel_library()`; the binding opens them and files their records.
//
// The configuration structs stand in the global namespace: nvcc 13.0 emits stubs that do not
// compile when a class-type template argument lives in a namespace of its own.
#pragma once

#include <compare>
#include <cstdint>

// torch's scalar-type numbers.
enum class DType : int { FP16 = 5, BF16 = 15 };

// Against which value of a row the softmax takes its exponentials.
enum class SoftmaxReference : int {
    EXACT = 0,               // the row's maximum up to and with this tile
    EXACT_SKIP_RESCALE = 1,  // the same; O is rescaled only when a row of the warp grew
    LAGGED = 2,              // the maximum before this tile; growth beyond 2^8 is adopted
    ANCHORED = 3,            // the maximum of the first tiles, for good; examined once, in the end (Ampere)
};

// Every choice of one Ampere-class kernel. Names and order: flash_helpers.kernel_configs.
struct FlashForwardKernelConfig {
    DType dtype;
    int d_head;
    int B_r;
    int B_c;
    int n_warps;
    bool async_copy;
    bool eager_load_blocks;
    bool swizzled;
    int Q_mma_load_K_tiles;
    int K_mma_load_K_tiles;
    int V_mma_load_K_tiles;
    bool mma_double_buffer_loads;
    bool optimized_softmax;
    int kv_stages = 1;
    bool mbarrier = false;
    SoftmaxReference softmax_reference = SoftmaxReference::EXACT;
    bool tensor_row_sums = false;
    int fragments_ahead = 0;
    bool paired_warps = false;

    auto operator<=>(const FlashForwardKernelConfig &) const = default;
};

// Where the Hopper family starts the next work item's first product.
enum class NextItem : int {
    NONE = 0,           // after this item is stored
    WITH_LAST_PV = 1,   // together with this item's last P V
    AFTER_LAST_PV = 2,  // after the last P V, under the normalisation and store of O
};

// Every choice of one Hopper-class kernel. Names and order: flash_helpers.kernel_configs.
struct HopperForwardKernelConfig {
    DType dtype;
    int d_head;
    int d_head_v;
    int B_r;
    int B_c;
    int kv_stages;
    int q_stages;
    bool overlap_products;
    bool ping_pong;
    SoftmaxReference softmax_reference;
    bool forced_overlap;
    NextItem next_item;
    bool direct_store;
    bool dynamic_schedule;
    bool head_sections;
    bool early_pass = false;
    bool trimmed = false;
    bool paired_blocks = false;
    bool half_tiles = false;
    int section_heads = 0;
    int prefetch_next = 0;
    int extra_k_stages = 0;
    int q_register_steps = 0;

    auto operator<=>(const HopperForwardKernelConfig &) const = default;
};

// What a kernel is compiled to be able to do; each feature's run-time part is in ForwardProblem. Names and
// order: flash_helpers.kernels.traits.
struct ForwardTraits {
    bool causal = false;       // key j is visible to query i when j <= i + (seq_len_k - seq_len_q)
    bool window = false;       // ... only near the diagonal; takes care of causal too, as window_right = 0
    bool softcap = false;      // scores become softcap * tanh(score / softcap)
    bool sinks = false;        // a logit a head takes part in the softmax and has no value
    bool varlen = false;       // sequences of different lengths, packed one after the other
    bool split = false;        // the keys of a query block are shared by several thread blocks
    bool padded_head = false;  // tensors have fewer columns than the kernel's d_head
    bool paged = false;        // rows of K and V lie in pages that a table names

    auto operator<=>(const ForwardTraits &) const = default;
};

namespace flash {

// Distances between neighbours, in elements. The head dimension's stride is 1.
struct TensorStrides {
    int64_t batch;
    int64_t seq;
    int64_t head;
};

// One call: what to compute, on raw device pointers. Every family's launcher takes this and makes
// its own kernel arguments of it. What belongs to a trait is read only by kernels that have it.
struct ForwardProblem {
    const void *q;  // (batch, seq_len_q, n_heads, d_head)
    const void *k;  // (batch, seq_len_k, n_heads_kv, d_head)
    const void *v;  // (batch, seq_len_k, n_heads_kv, d_head_v)
    void *o;        // (batch, seq_len_q, n_heads, d_head_v)
    float *lse;     // (batch, n_heads, seq_len_q), natural log; nullptr: not wanted
    TensorStrides q_strides, k_strides, v_strides, o_strides;
    int batch, n_heads, n_heads_kv;
    int seq_len_q, seq_len_k;
    int d_head, d_head_v;  // of the tensors; less than the kernel's only with padded_head
    float softmax_scale;

    // window: query i stands at key p = i + (seq_len_k - seq_len_q) and sees the keys p - window_left
    // ... p + window_right. Unbounded sides are 2^30 - 1, so that sums with positions fit 32 bits.
    int window_left, window_right;
    // softcap
    float softcap;
    // sinks: (n_heads), natural-log logits
    const float *sinks;
    // varlen: sequence b owns rows cu_seqlens[b] ... cu_seqlens[b + 1] of q and o, of k and v. The batch
    // strides are not used; seq_len_q is the longest sequence's, seq_len_k no less than that of any, such as
    // total_k; total_q and total_k are all rows of q and of k; lse is (n_heads, total_q). Rows of o before
    // the first offset and behind the last become 0, their lse -inf. cu_seqlens_q may be nullptr: every
    // sequence then has seq_len_q rows at its place in the batch, as without the trait; likewise
    // cu_seqlens_k. seqused_k, (batch), if given, is how many keys of each sequence exist. Whatever these
    // numbers are, no row is read or written that the tensors do not have (sequence_rows.cuh).
    const int *cu_seqlens_q, *cu_seqlens_k, *seqused_k;
    int64_t total_q, total_k;
    // split: workspaces of the parts, (n_splits, batch, n_heads, seq_len_q, d_head_v) and (n_splits, batch,
    // n_heads, seq_len_q). The launcher combines them into o and lse after the main kernel.
    int n_splits;
    float *partial_o, *partial_lse;
    // paged: k and v are (n_pages, page_size, n_heads_kv, …) with the page as their batch dimension, and
    // block_table is (batch, max_pages), the pages of each sequence. seq_len_k is max_pages * page_size,
    // which seqused_k cuts down; cu_seqlens_k is nullptr.
    const int *block_table;
    int n_pages, max_pages, page_size;
};

// Resources of a compiled kernel as the driver reports them for the current device.
struct KernelAttributes {
    int registers;
    int local_bytes;  // spills and stack, bytes a thread
    int static_smem_bytes;
    int max_threads_per_block;
    int blocks_per_sm;
};

// A compiled kernel, as its library presents it. All functions return a cudaError_t as int.
// `load` raises the dynamic shared memory limit; it is called once for each device.
template <typename Config>
struct ForwardKernelRecord {
    Config config;
    ForwardTraits traits;
    int target;  // 80 for sm_80
    int n_threads;
    int smem_bytes;  // dynamic
    int (*load)();
    int (*launch)(const ForwardProblem &problem, void *stream);
    int (*attributes)(KernelAttributes &out);
};

// What a kernel library exports. `abi` is kAbiVersion of the headers it was compiled from.
struct KernelLibrary {
    int abi;
    const char *family;  // "ampere", "hopper"
    int n_kernels;
    const void *const *records;  // each a const ForwardKernelRecord<Config of the family> *
    const char *(*error_string)(int error);
};

inline constexpr int kAbiVersion = 6;
inline constexpr const char *kKernelLibrarySymbol = "flash_attention_kernel_library";

}  // namespace flash
