// What the binding, the kernel libraries and the kernels agree on: configurations, traits, the
// problem one call states, and the record by which a compiled kernel makes itself known.
//
// Host and device code of every family includes this file; it knows neither torch nor CUDA, so a
// plain C++ compiler builds the binding. What the backward direction adds is in backward.cuh. Kernel
// libraries are shared objects that export `flash_attention_kernel_library()`; the binding opens them and
// files their records.
//
// The structs of configurations and traits are generated from the Python dataclasses of the same names. They
// stand in the global namespace: nvcc 13.0 emits stubs that do not compile when a class-type template
// argument lives in a namespace of its own.
#pragma once

#include <cstdint>

#include "generated/structs.cuh"
#include "mod_arguments.cuh"

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
    // ... p + window_right. Both have either sign. Unbounded sides are 2^30 - 1, and none is below -2^30, so
    // that sums with positions fit 32 bits.
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
    bool o_float32;  // o is float32, as the parts are, and is not rounded
    // chunks of keys (common/chunks.cuh): parts are chunks, of which partial_lse has pairs of floats. A
    // kernel that takes several chunks of a row keeps in kept_sums what its shared memory has no room for
    // (StaticForwardKernelConfig::kept_slots), of as many blocks as run at a time (config.kept_sums).
    float *kept_sums;
    // paged: k and v are (n_pages, page_size, n_heads_kv, …) with the page as their batch dimension, and
    // block_table is (batch, max_pages), the pages of each sequence. seq_len_k is max_pages * page_size,
    // which seqused_k cuts down; cu_seqlens_k is nullptr.
    const int *block_table;
    int n_pages, max_pages, page_size;
    // planned: cu_seqlens_q is given, and of each sequence's queries only the first seqused_q, (batch),
    // count, if that is given; the others are padding. How many parts the keys of a sequence are cut into
    // follows from its lengths and from plan_* (part_plan.cuh). partial_o and partial_lse have partial_rows
    // rows; n_splits is not used.
    const int *seqused_q;
    int plan_slots, plan_shortest, plan_longest, plan_few_queries, plan_fixed;
    int64_t partial_rows;
    // Multiprocessors that the launch may use, by kernels whose blocks are persistent; 0: all.
    int n_sms;
    // What a kernel with a mod is told; nullptr for one without. Read while `launch` runs, and not later.
    const ModArguments *mod;
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
    ModSignature mod{};  // what problem.mod has to hold; by default it is not read
    // Fills problem.mod->tiles for later launches; nullptr: they need none.
    int (*find_tiles)(const ForwardProblem &problem, void *stream) = nullptr;
};

// What a kernel library exports. `abi` is kAbiVersion of the headers it was compiled from.
struct KernelLibrary {
    int abi;
    const char *family;     // "ampere", "hopper"
    const char *direction;  // "forward", "backward"
    int n_kernels;
    const void *const *records;  // each a const Record<Config> * of its family and direction
    const char *(*error_string)(int error);
};

// Raised by hand when what stands in this file or in backward.cuh changes; the digest sees the structs of
// configurations and traits.
inline constexpr int kInterfaceVersion = 12;
inline constexpr int kAbiVersion = kInterfaceVersion << 24 | kStructsDigest;
inline constexpr const char *kKernelLibrarySymbol = "flash_attention_kernel_library";

}  // namespace flash
