// From a problem to a launch: arguments, tensor maps, order of the work; and the record by which a kernel
// library presents a kernel of this family.
//
// `launch` answers with a cudaError_t:
//     cudaErrorInvalidValue        tensors that TMA cannot express (see tensor_map.cuh), too large a
//                                  problem, or what a trait needs is missing
//     cudaErrorNotSupported        a negative softmax_scale: the online softmax takes maxima of unscaled
//                                  scores. attention(q, k, v, scale) equals attention(-q, k, v, -scale):
//                                  the caller negates Q, which is exact, or takes another family
//     cudaErrorInsufficientDriver  a driver older than CUDA 12.0
// or with what the launch itself reports.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <numeric>

#include "common/chunk_combine.cuh"
#include "common/early_launch.cuh"
#include "common/find_tiles.cuh"
#include "common/planned_combine.cuh"
#include "common/scheduler_counters.cuh"
#include "common/sm_count.cuh"
#include "common/split_combine.cuh"
#include "hopper/forward/encode_maps.cuh"
#include "hopper/forward/kernel.cuh"
#include "hopper/forward/section_width.cuh"

namespace flash::hopper {

inline constexpr int kTarget = 90;         // sm_90a
inline constexpr int kPageAlignment = 16;  // rows: parts of pages that copies take end at swizzled rows of 8

// ---------------------------------------------------------------- arguments
// The least factor of an exponent. It is larger than the Ampere family's, because the kernel divides by it:
// the growth of a lagged reference, up to 2^100, becomes a score again.
inline constexpr float kLeastExponentFactor = 0x1p-100f;

// What would make a kernel compute nonsense or touch memory that is not the tensors'.
template <typename Kernel>
bool traits_allow(const ForwardProblem &problem) {
    // Bounds of a mod's values count on shorter ones, too (flash_helpers/mods/intervals.py).
    if ((Kernel::traits.window || Kernel::has_mod) &&
        (problem.seq_len_q > kMaxWindowedLength || problem.seq_len_k > kMaxWindowedLength)) {
        return false;
    }
    if (Kernel::has_mod && problem.mod == nullptr) return false;
    if (problem.n_sms < 0) return false;
    if (problem.o_float32 && !Kernel::traits.split && !Kernel::traits.planned) return false;
    if (problem.seqused_q != nullptr && !Kernel::traits.planned) return false;
    if (Kernel::traits.planned) {
        const int group = heads_as_rows(problem.n_heads / problem.n_heads_kv, Kernel::B_r);
        if (!plan_allows(problem, Kernel::B_r / group)) return false;
    }
    if (Kernel::traits.softcap && !(problem.softcap > 0)) return false;
    if (Kernel::traits.sinks && problem.sinks == nullptr) return false;
    if (Kernel::traits.split && (problem.n_splits < 1 || problem.n_splits > kMaxSplits ||
                                 problem.partial_o == nullptr || problem.partial_lse == nullptr)) {
        return false;
    }
    if constexpr (Kernel::chunk_tiles > 0) {
        // A sequence of more chunks than parts is not cut: one block takes all of them. What a launch knows
        // of packed sequences is that none is longer than all together.
        const int n_chunks = ceil_div(problem.seq_len_k, Kernel::chunk_tiles * Kernel::B_c);
        const int n_parts = Kernel::traits.split ? problem.n_splits : 1;
        constexpr bool kAllInShared = Kernel::kept_slots == Kernel::wanted_kept_slots;
        if (!kAllInShared && n_chunks > n_parts && problem.kept_sums == nullptr) return false;
    }
    if (Kernel::traits.paged &&
        (problem.block_table == nullptr || problem.page_size % kPageAlignment != 0 || problem.page_size < 1 ||
         problem.n_pages < 1 || problem.seq_len_k != int64_t(problem.max_pages) * problem.page_size ||
         problem.cu_seqlens_k != nullptr)) {
        return false;
    }
    if (!Kernel::traits.padded_head) return true;
    // Of a box without one column that exists, copies touch the base, which a ragged map has before the
    // tensor.
    if (Kernel::traits.varlen && (panel_count(problem.d_head) != panel_count(Kernel::d_head) ||
                                  panel_count(problem.d_head_v) != panel_count(Kernel::d_head_v))) {
        return false;
    }
    return problem.d_head % kChunkElements == 0 && problem.d_head_v % kChunkElements == 0;
}

template <typename Kernel>
cudaError_t make_arguments(const ForwardProblem &problem, KernelArgs<typename Kernel::Mod> &args) {
    constexpr int kKeyBytes = (Kernel::d_head + Kernel::d_head_v) * 2;
    if (!(problem.softmax_scale >= 0.f)) return cudaErrorNotSupported;
    if (!traits_allow<Kernel>(problem)) return cudaErrorInvalidValue;
    const bool uneven = Kernel::traits.causal || Kernel::traits.window;
    const int n_keys = Kernel::traits.varlen ? typical_keys(problem) : problem.seq_len_k;
    const int section_heads = !Kernel::cfg.head_sections ? 1
                              : Kernel::cfg.section_heads != 0
                                  ? Kernel::cfg.section_heads
                                  : section_width(uneven, problem.seq_len_q, n_keys, kKeyBytes);
    const Mask<Kernel::traits> mask{problem.seq_len_q, problem.seq_len_k, problem.window_left,
                                    problem.window_right};
    args.n_splits = Kernel::traits.split ? problem.n_splits : 1;
    if (!plan_work(problem.batch, problem.n_heads, mask, Kernel::item_rows, section_heads, args.n_splits,
                   args.work)) {
        return cudaErrorInvalidValue;
    }
    if constexpr (Kernel::has_mod) args.mod = mod_of_launch<typename Kernel::Mod>(*problem.mod);
    args.o = problem.o;
    args.lse = problem.lse;
    args.o_strides = problem.o_strides;
    args.heads_per_kv_head = problem.n_heads / problem.n_heads_kv;
    const SoftmaxScale scale =
        Kernel::traits.softcap
            ? make_capped_softmax_scale(problem.softmax_scale, problem.softcap, kLeastExponentFactor)
            : make_softmax_scale(problem.softmax_scale, Kernel::counts_unscaled, kLeastExponentFactor);
    args.exponent_factor = scale.exponent_factor;
    args.inv_exponent_factor = 1.f / scale.exponent_factor;
    args.score_factor =
        Kernel::has_mod && Kernel::counts_unscaled ? kLog2e / scale.exponent_factor : scale.score_factor;
    args.lowest = scale.lowest;
    if constexpr (Kernel::traits.softcap) {
        args.short_cap_series = tanh_series_of<3>(scale.score_factor, scale.exponent_factor);
        args.long_cap_series = tanh_series_of<7>(1, scale.exponent_factor);
    }
    args.window_left = problem.window_left;
    args.window_right = problem.window_right;
    args.sinks = problem.sinks;
    args.cu_seqlens_q = problem.cu_seqlens_q;
    args.cu_seqlens_k = problem.cu_seqlens_k;
    args.seqused_k = problem.seqused_k;
    args.total_q = problem.total_q;
    args.rows_q = nameable_rows(problem.total_q);
    args.rows_k = nameable_rows(problem.total_k);
    args.batch = problem.batch;
    args.partial_o = problem.partial_o;
    args.partial_lse = problem.partial_lse;
    args.kept_sums = problem.kept_sums;
    args.d_head_v = problem.d_head_v;
    if constexpr (Kernel::traits.paged) {
        args.block_table = problem.block_table;
        args.max_pages = problem.max_pages;
        args.n_pages = problem.n_pages;
        args.box_rows = std::gcd(problem.page_size, Kernel::B_c);
        args.page_size = PageSize::of(problem.page_size);
    }
    if constexpr (Kernel::traits.planned) {
        args.planned = planned_launch(problem, Kernel::B_r, kKeyBytes);
        args.output = planned_output(problem, Kernel::traits.sinks);
        args.heads_per_kv_head = args.planned.heads_per_kv_head;
    }
    return cudaSuccess;
}

// Stores of 16 bytes, with or without TMA.
inline bool output_is_aligned(const ForwardProblem &problem) {
    const int element_bytes = problem.o_float32 ? 4 : 2;
    const auto aligned = [&](int64_t stride, int size) {
        return size == 1 || stride * element_bytes % 16 == 0;
    };
    return reinterpret_cast<uintptr_t>(problem.o) % 16 == 0 &&
           aligned(problem.o_strides.batch, problem.batch) &&
           aligned(problem.o_strides.seq, problem.seq_len_q) &&
           aligned(problem.o_strides.head, problem.n_heads);
}

// ---------------------------------------------------------------- launch
template <typename Kernel>
const void *kernel_function() {
    if constexpr (Kernel::copies_streamed) {
        return reinterpret_cast<const void *>(
            &hopper_forward_streaming_kernel<Kernel::cfg, Kernel::traits, typename Kernel::Mod>);
    } else if constexpr (Kernel::has_mod) {
        return reinterpret_cast<const void *>(
            &hopper_forward_mod_kernel<Kernel::cfg, Kernel::traits, typename Kernel::Mod>);
    } else {
        return reinterpret_cast<const void *>(&hopper_forward_kernel<Kernel::cfg, Kernel::traits>);
    }
}

template <typename Kernel>
cudaError_t launch_blocks(int n_blocks, EncodedMaps &maps, KernelArgs<typename Kernel::Mod> &args,
                          cudaStream_t stream) {
    const void *kernel = kernel_function<Kernel>();
    void *parameters[] = {&maps.q, &maps.k, &maps.v, &maps.o, &args, nullptr};
    if constexpr (Kernel::copies_streamed) {
        parameters[4] = &maps.streamed;
        parameters[5] = &args;
    }
    if constexpr (Kernel::paired_blocks) {
        cudaLaunchAttribute cluster{};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = 2;
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(n_blocks);
        config.blockDim = dim3(Kernel::n_threads);
        config.dynamicSmemBytes = Kernel::smem_bytes;
        config.stream = stream;
        config.attrs = &cluster;
        config.numAttrs = 1;
        return cudaLaunchKernelExC(&config, kernel, parameters);
    }
    constexpr bool kEarly = Kernel::traits.split || Kernel::traits.planned;
    return launch_kernel<kEarly>(kernel, n_blocks, Kernel::n_threads, Kernel::smem_bytes, stream, parameters);
}

template <typename Kernel>
cudaError_t launch(const ForwardProblem &problem, cudaStream_t stream) {
    if (problem.batch == 0 || problem.n_heads == 0 || problem.seq_len_q == 0)
        return cudaSuccess;  // no output
    if (!output_is_aligned(problem)) return cudaErrorInvalidValue;
    EncodedMaps maps{};
    if constexpr (Kernel::copies_streamed) {
        if (!encode_streamed<Kernel>(problem, maps)) {
            return launch<typename Kernel::WithoutCopies>(problem, stream);
        }
    }

    int n_sms = 0;
    cudaError_t error = sm_count(n_sms);
    if (error != cudaSuccess) return error;
    if (problem.n_sms > 0) n_sms = std::min(n_sms, problem.n_sms);
    KernelArgs<typename Kernel::Mod> args{};
    error = make_arguments<Kernel>(problem, args);
    if (error != cudaSuccess) return error;

    constexpr int kBlocksAnItem = Kernel::paired_blocks ? 2 : 1;
    const int n_turns = n_sms / kBlocksAnItem;  // items at a time
    if (n_turns < 1) return cudaErrorInvalidValue;
    if (args.work.n_items > 0) {
        error = encode_maps<Kernel>(problem, maps);
        if (error != cudaSuccess) return error;
        // Where each block has one item at most, there is nothing to share out.
        if (Kernel::cfg.dynamic_schedule && (Kernel::traits.planned || args.work.n_items > n_turns)) {
            SchedulerCounters *counters = nullptr;
            error = SchedulerCounters::of_current_device(counters);
            if (error != cudaSuccess) return error;
            error = counters->acquire(stream, args.counter);
            if (error != cudaSuccess) return error;
        }
    }
    // One persistent block an SM. Rows without keys are shared by all of them.
    // How many items are planned, only the device knows.
    const bool all_turns = Kernel::traits.planned || args.work.first_q_block > 0;
    const int n_blocks = (all_turns ? n_turns : std::min(n_turns, args.work.n_items)) * kBlocksAnItem;
    error = launch_blocks<Kernel>(n_blocks, maps, args, stream);
    if (error != cudaSuccess) cudaGetLastError();  // reported here: the next call starts afresh
    if constexpr (Kernel::traits.split) {
        if constexpr (Kernel::chunk_tiles > 0) {
            if (error != cudaSuccess) return error;
            return static_cast<cudaError_t>(launch_chunk_combine<Kernel::dtype, Kernel::traits, kTarget>(
                problem, args.lowest * args.exponent_factor, stream));
        } else if (error == cudaSuccess) {
            return static_cast<cudaError_t>(
                launch_split_combine<Kernel::dtype, Kernel::d_head_v, Kernel::traits, kTarget>(problem,
                                                                                               stream));
        }
    }
    if constexpr (Kernel::traits.planned) {
        if (error == cudaSuccess) {
            return launch_planned_combine<Kernel::dtype, Kernel::traits, Kernel::B_c, kTarget,
                                          Kernel::chunk_tiles>(problem, args.planned, n_sms, stream,
                                                               args.lowest * args.exponent_factor);
        }
    }
    return error;
}

template <typename Kernel>
cudaError_t load() {
    if constexpr (Kernel::copies_streamed) {
        const cudaError_t error = load<typename Kernel::WithoutCopies>();
        if (error != cudaSuccess) return error;
    }
    const cudaError_t error = cudaFuncSetAttribute(
        kernel_function<Kernel>(), cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::smem_bytes);
    if (error != cudaSuccess || !Kernel::cfg.dynamic_schedule) return error;
    SchedulerCounters *counters = nullptr;
    const cudaError_t device_error = SchedulerCounters::of_current_device(counters);
    return device_error == cudaSuccess ? counters->prepare() : device_error;
}

template <typename Kernel>
cudaError_t attributes(KernelAttributes &out) {
    cudaFuncAttributes attributes{};
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel_function<Kernel>());
    if (error != cudaSuccess) return error;
    int blocks_per_sm = 0;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, kernel_function<Kernel>(),
                                                          Kernel::n_threads, Kernel::smem_bytes);
    if (error != cudaSuccess) return error;
    out = {attributes.numRegs, static_cast<int>(attributes.localSizeBytes),
           static_cast<int>(attributes.sharedSizeBytes), attributes.maxThreadsPerBlock, blocks_per_sm};
    return cudaSuccess;
}

template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS, int target, typename MOD = NoMod>
constexpr ForwardKernelRecord<HopperForwardKernelConfig> make_record() {
    static_assert(target == kTarget, "the Hopper family is compiled for target 90 (sm_90a) only");
    using Kernel = StaticForwardKernelConfig<CFG, TRAITS, MOD>;
    return {
        .config = CFG,
        .traits = TRAITS,
        .target = target,
        .n_threads = Kernel::n_threads,
        .smem_bytes = Kernel::smem_bytes,
        .load = [] { return static_cast<int>(load<Kernel>()); },
        .launch =
            [](const ForwardProblem &problem, void *stream) {
                return static_cast<int>(launch<Kernel>(problem, static_cast<cudaStream_t>(stream)));
            },
        .attributes = [](KernelAttributes &out) { return static_cast<int>(attributes<Kernel>(out)); },
        .mod = signature_of<MOD>(),
        .find_tiles = tile_finder<Kernel>(),
    };
}

}  // namespace flash::hopper
