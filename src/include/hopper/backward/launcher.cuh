// From a problem to the launches of a backward call: arguments, tensor maps, order of the work; and the
// record by which a kernel library presents a kernel of this direction.
//
// `launch` answers with a cudaError_t:
//     cudaErrorInvalidValue        tensors that TMA cannot express (see tensor_map.cuh), too large a problem,
//     a
//                                  workspace or what a trait needs is missing
//     cudaErrorInsufficientDriver  a driver older than CUDA 12.0
// or with what a launch itself reports.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "common/backward/captured_gradients.cuh"
#include "common/backward/convert_dq.cuh"
#include "common/backward/prepare.cuh"
#include "common/early_launch.cuh"
#include "common/scheduler_counters.cuh"
#include "common/sm_count.cuh"
#include "common/softmax_scale.cuh"
#include "hopper/backward/dq_kernel.cuh"
#include "hopper/backward/encode_maps.cuh"
#include "hopper/backward/kernel.cuh"

namespace flash::hopper {

inline constexpr int kBackwardTarget = 90;  // sm_90a

// ---------------------------------------------------------------- arguments
template <typename Kernel>
using ArgsOf = BackwardArgs<typename Kernel::Mod>;

template <typename Kernel>
bool backward_problem_is_whole(const BackwardProblem &p) {
    if (p.n_heads_kv < 1 || p.n_heads % p.n_heads_kv != 0) return false;
    if (p.lse == nullptr || p.delta == nullptr || (Kernel::sums_dq && p.dq_sums == nullptr)) return false;
    if (Kernel::traits.softcap && !(p.softcap > 0)) return false;
    if (Kernel::has_mod) {
        // Bounds of a mod's values count on shorter sequences (flash_helpers/mods/intervals.py).
        if (p.mod == nullptr || p.seq_len_q > kMaxWindowedLength || p.seq_len_k > kMaxWindowedLength) {
            return false;
        }
    }
    if (Kernel::traits.padded_head) {
        return p.d_head % kChunkElements == 0 && p.d_head_v % kChunkElements == 0 &&
               panel_count(p.d_head) == panel_count(Kernel::d_head) &&
               panel_count(p.d_head_v) == panel_count(Kernel::d_head_v);
    }
    return p.d_head == Kernel::d_head && p.d_head_v == Kernel::d_head_v;
}

// (batch, head) pairs of a section: many under a mask, so that the end of each is filled by its last tiles,
// of which most masks leave the shortest items.
inline constexpr int kMaskedSectionHeads = 16;

// The items of one kernel: n_tiles tiles of each of `heads` heads a batch item.
template <typename Kernel>
cudaError_t plan_items(const BackwardProblem &p, int heads, int n_tiles, BackwardKernelArgs &args) {
    const bool uneven = Kernel::traits.causal || Kernel::traits.window || hides_keys<typename Kernel::Mod>();
    const int64_t pairs = int64_t{p.batch} * heads;
    if (p.seq_len_q > kMaxSeqLen || p.seq_len_k > kMaxSeqLen || pairs * n_tiles > kMaxItems)
        return cudaErrorInvalidValue;
    args.n_tiles = n_tiles;
    args.n_items = static_cast<int>(pairs * n_tiles);
    const int most = Kernel::cfg.head_sections && uneven ? kMaskedSectionHeads : 1;
    args.section_heads = static_cast<int>(std::min<int64_t>(Kernel::traits.varlen ? heads : pairs, most));
    return cudaSuccess;
}

// All but the items.
template <typename Kernel>
cudaError_t make_backward_arguments(const BackwardProblem &p, ArgsOf<Kernel> &args) {
    if (!backward_problem_is_whole<Kernel>(p)) return cudaErrorInvalidValue;
    if constexpr (Kernel::has_mod) args.mod = mod_of_launch<typename Kernel::Mod>(*p.mod);
    const RowTiles dq_tiles = row_tiles(p);
    if (dq_tiles.of_all_heads(p.n_heads) > INT32_MAX) return cudaErrorInvalidValue;
    args.lse = p.lse;
    args.delta = p.delta;
    args.dq_sums = p.dq_sums;
    args.dk = p.dk;
    args.dv = p.dv;
    args.dk_strides = p.dk_strides;
    args.dv_strides = p.dv_strides;
    args.o = p.o;
    args.dlse = p.dlse;
    args.written_delta = p.delta;
    args.dq = p.dq;
    args.o_strides = p.o_strides;
    args.dq_strides = p.dq_strides;
    args.seq_len_q = p.seq_len_q;
    args.seq_len_k = p.seq_len_k;
    args.n_heads_kv = p.n_heads_kv;
    args.group = p.n_heads / p.n_heads_kv;
    args.batch = p.batch;
    args.dq_tiles =
        Kernel::keeps_dq ? ceil_div(p.seq_len_q, Kernel::B_r) : static_cast<int>(dq_tiles.of_head);
    if (Kernel::traits.softcap) {
        const SoftmaxScale scale = make_capped_softmax_scale(p.softmax_scale, p.softcap);
        args.score_factor = scale.score_factor;
        args.exponent_factor = scale.exponent_factor;
    } else if (Kernel::has_mod) {
        args.score_factor = p.softmax_scale;
        args.exponent_factor = kLog2e;
        if (!Kernel::mod_changes_scores) {
            args.exponent_factor = p.softmax_scale * kLog2e;
            // Not 0: a hidden score, which is infinite, has to stay so.
            if (std::abs(args.exponent_factor) < FLT_MIN) args.exponent_factor = FLT_MIN;
        }
    } else {
        args.exponent_factor = p.softmax_scale * kLog2e;
    }
    args.softmax_scale = p.softmax_scale;
    args.window_left = p.window_left;
    args.window_right = p.window_right;
    args.cu_seqlens_q = p.cu_seqlens_q;
    args.cu_seqlens_k = p.cu_seqlens_k;
    args.seqused_q = p.seqused_q;
    args.seqused_k = p.seqused_k;
    args.total_q = p.total_q;
    args.total_k = p.total_k;
    args.rows_q = nameable_rows(p.total_q);
    args.rows_k = nameable_rows(p.total_k);
    args.d_head = p.d_head;
    args.d_head_v = p.d_head_v;
    return cudaSuccess;
}

// ---------------------------------------------------------------- launches
// Persistent: one an SM. How many items packed sequences have, only the device knows.
template <typename Kernel>
int thread_blocks(int n_sms, int n_items) {
    return Kernel::traits.varlen ? n_sms : std::min(n_sms, n_items);
}

// Persistent blocks of one kernel over its items. kEarly: see early_launch.cuh.
template <typename Kernel, bool kEarly>
cudaError_t launch_items(const void *kernel, const BackwardProblem &p, ArgsOf<Kernel> &args,
                         cudaStream_t stream) {
    if (args.n_items == 0) return cudaSuccess;
    int n_sms = 0;
    cudaError_t error = sm_count(n_sms);
    if (error != cudaSuccess) return error;
    EncodedBackwardMaps maps{};
    error = encode_backward_maps<Kernel>(p, maps);
    if (error != cudaSuccess) return error;
    // Where each block has one item at most, there is nothing to share out.
    args.counter = nullptr;
    if (Kernel::cfg.dynamic_schedule && (Kernel::traits.varlen || args.n_items > n_sms)) {
        SchedulerCounters *counters = nullptr;
        error = SchedulerCounters::of_current_device(counters);
        if (error == cudaSuccess) error = counters->acquire(stream, args.counter);
        if (error != cudaSuccess) return error;
    }
    const int n_blocks = thread_blocks<Kernel>(n_sms, args.n_items);
    void *parameters[] = {&maps.q, &maps.k, &maps.v, &maps.dout, &args};
    return launch_kernel<kEarly>(kernel, n_blocks, Kernel::n_threads, Kernel::smem_bytes, stream, parameters);
}

template <typename Kernel>
const void *key_kernel() {
    if constexpr (Kernel::has_mod) {
        return reinterpret_cast<const void *>(
            &hopper_backward_mod_kernel<Kernel::cfg, Kernel::traits, typename Kernel::Mod>);
    } else {
        return reinterpret_cast<const void *>(&hopper_backward_kernel<Kernel::cfg, Kernel::traits>);
    }
}
template <typename Kernel>
const void *dq_kernel() {
    if constexpr (Kernel::has_mod) {
        return reinterpret_cast<const void *>(
            &hopper_dq_mod_kernel<Kernel::cfg, Kernel::traits, typename Kernel::Mod>);
    } else {
        return reinterpret_cast<const void *>(&hopper_dq_kernel<Kernel::cfg, Kernel::traits>);
    }
}

// dK and dV, and where it has no kernel of its own the sums of dQ. delta is there, dq_sums are 0.
template <typename Kernel>
cudaError_t launch_key_blocks(const BackwardProblem &p, ArgsOf<Kernel> args, cudaStream_t stream) {
    const int n_tiles = Kernel::keeps_dq ? 1 : ceil_div(p.seq_len_k, Kernel::B_c);
    const cudaError_t error = plan_items<Kernel>(p, p.n_heads_kv, n_tiles, args);
    if (error != cudaSuccess) return error;
    return launch_items<Kernel, true>(key_kernel<Kernel>(), p, args, stream);
}

// dQ and delta.
template <typename Kernel>
cudaError_t launch_dq(const BackwardProblem &p, ArgsOf<Kernel> args, cudaStream_t stream) {
    using DqKernel = StaticDqKernelConfig<Kernel::cfg, Kernel::traits, typename Kernel::Mod>;
    const cudaError_t error = plan_items<DqKernel>(p, p.n_heads, ceil_div(p.seq_len_q, DqKernel::B_r), args);
    if (error != cudaSuccess) return error;
    return launch_items<DqKernel, false>(dq_kernel<Kernel>(), p, args, stream);
}

// What a kernel without varlen must not see, and lengths of 0, of which there is no tensor map: their rows
// are none all the same.
template <typename Kernel>
BackwardProblem plain_problem(BackwardProblem p) {
    if constexpr (Kernel::traits.varlen) {
        p.seq_len_q = std::max(p.seq_len_q, 1);
        p.seq_len_k = std::max(p.seq_len_k, 1);
    } else {
        p.cu_seqlens_q = p.cu_seqlens_k = p.seqused_q = p.seqused_k = nullptr;
    }
    return p;
}

template <typename Kernel>
cudaError_t launch_backward(const BackwardProblem &given, cudaStream_t stream) {
    const BackwardProblem p = plain_problem<Kernel>(given);
    ArgsOf<Kernel> args{};
    cudaError_t error = make_backward_arguments<Kernel>(p, args);
    if (error == cudaSuccess) error = launch_find_tiles<typename Kernel::Mod>(p, stream);
    if constexpr (Kernel::sums_dq) {
        const PrepareWork work{.clears_sums = !Kernel::keeps_dq,
                               .clears_unvisited_rows = Kernel::keeps_dq,
                               .rows_per_tile = Kernel::B_r};
        if (error == cudaSuccess)
            error = launch_prepare_backward<Kernel::dtype, Kernel::traits>(p, work, stream);
        if (error == cudaSuccess) error = launch_key_blocks<Kernel>(p, args, stream);
        if (error == cudaSuccess && !Kernel::keeps_dq)
            error =
                launch_convert_dq<Kernel::dtype, Kernel::d_head, true, Kernel::traits.float_query_gradients>(
                    p, stream, Kernel::p_unit);
    } else {
        // Also where dQ is not wanted: delta has the same bits then.
        if (error == cudaSuccess) error = launch_dq<Kernel>(p, args, stream);
        if (error == cudaSuccess && (p.dk != nullptr || p.dv != nullptr))
            error = launch_key_blocks<Kernel>(p, args, stream);
    }
    if (error == cudaSuccess) error = launch_gathering<Kernel>(p, stream);
    if (error != cudaSuccess) cudaGetLastError();  // reported here: the next call starts afresh
    return error;
}

template <typename Kernel>
cudaError_t load_backward() {
    cudaError_t error = cudaFuncSetAttribute(key_kernel<Kernel>(),
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::smem_bytes);
    if constexpr (!Kernel::sums_dq) {
        if (error == cudaSuccess) {
            using DqKernel = StaticDqKernelConfig<Kernel::cfg, Kernel::traits, typename Kernel::Mod>;
            error = cudaFuncSetAttribute(dq_kernel<Kernel>(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         DqKernel::smem_bytes);
        }
    }
    if (error == cudaSuccess) error = load_gathering<Kernel>();
    if (error != cudaSuccess || !Kernel::cfg.dynamic_schedule) return error;
    SchedulerCounters *counters = nullptr;
    const cudaError_t device_error = SchedulerCounters::of_current_device(counters);
    return device_error == cudaSuccess ? counters->prepare() : device_error;
}

template <typename Kernel>
cudaError_t backward_attributes(KernelAttributes &out) {
    cudaFuncAttributes attributes{};
    const void *kernel = key_kernel<Kernel>();
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
    int blocks_per_sm = 0;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, kernel, Kernel::n_threads,
                                                          Kernel::smem_bytes);
    if (error != cudaSuccess) return error;
    out = {attributes.numRegs, static_cast<int>(attributes.localSizeBytes),
           static_cast<int>(attributes.sharedSizeBytes), attributes.maxThreadsPerBlock, blocks_per_sm};
    return cudaSuccess;
}

// Each thread block's sums of the query heads of one key head. Without a device, for as many as there may be.
template <typename Kernel>
int64_t kept_sum_bytes(const BackwardProblem &p) {
    const int64_t pairs = int64_t{p.batch} * p.n_heads_kv;
    if (p.n_heads_kv < 1 || pairs > kMaxItems) return 0;  // refused by the launch
    int n_sms = 0;
    if (sm_count(n_sms) != cudaSuccess) n_sms = static_cast<int>(pairs);
    return int64_t{thread_blocks<Kernel>(n_sms, static_cast<int>(pairs))} * (p.n_heads / p.n_heads_kv) *
           ceil_div(p.seq_len_q, Kernel::B_r) * Kernel::B_r * Kernel::d_head * int64_t{sizeof(float)};
}

template <typename Kernel>
BackwardWorkspaces backward_workspaces(const BackwardProblem &problem) {
    const BackwardProblem p = plain_problem<Kernel>(problem);
    if constexpr (Kernel::keeps_dq) return {.dq_sums = kept_sum_bytes<Kernel>(p)};
    return {.dq_sums = Kernel::sums_dq ? dq_sum_floats(p) * int64_t{sizeof(float)} : 0};
}

template <HopperBackwardKernelConfig CFG, BackwardTraits TRAITS, int target, typename MOD = NoMod>
constexpr BackwardKernelRecord<HopperBackwardKernelConfig> make_backward_record() {
    static_assert(target == kBackwardTarget, "the Hopper family is compiled for target 90 (sm_90a) only");
    using Kernel = StaticBackwardKernelConfig<CFG, TRAITS, MOD>;
    return {
        .config = CFG,
        .traits = TRAITS,
        .target = target,
        .n_threads = Kernel::n_threads,
        .smem_bytes = Kernel::smem_bytes,
        .load = [] { return static_cast<int>(load_backward<Kernel>()); },
        .launch =
            [](const BackwardProblem &problem, void *stream) {
                return static_cast<int>(launch_backward<Kernel>(problem, static_cast<cudaStream_t>(stream)));
            },
        .attributes =
            [](KernelAttributes &out) { return static_cast<int>(backward_attributes<Kernel>(out)); },
        .workspaces = &backward_workspaces<Kernel>,
        .mod = signature_of<MOD>(),
    };
}

}  // namespace flash::hopper
