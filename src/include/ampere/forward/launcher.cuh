// The host side of one kernel: arguments from a problem, launch, resources, and its record.
//
// A generated translation unit includes this file and defines one record with make_record.
#pragma once

#include <cuda_runtime.h>

#include "ampere/forward/kernel.cuh"
#include "common/chunk_combine.cuh"
#include "common/early_launch.cuh"
#include "common/find_tiles.cuh"
#include "common/planned_combine.cuh"
#include "common/scheduler_counters.cuh"
#include "common/sm_count.cuh"
#include "common/split_combine.cuh"
#include "flash_attention.cuh"

namespace flash::ampere {

template <FlashForwardKernelConfig CFG, ForwardTraits TRAITS, typename MOD = NoMod>
struct ForwardLauncher {
    using Kernel = StaticForwardKernelConfig<CFG, TRAITS, MOD>;
    using Args = KernelArgs<MOD>;

    static const void *kernel() {
        if constexpr (is_mod<MOD>) {
            return reinterpret_cast<const void *>(&flash_forward_mod_kernel<CFG, TRAITS, MOD>);
        } else {
            return reinterpret_cast<const void *>(&flash_forward_kernel<CFG, TRAITS>);
        }
    }

    static ForwardKernelArgs make_args(const ForwardProblem &problem) {
        const int total_heads = problem.batch * problem.n_heads;
        const int heads_per_kv_head = problem.n_heads / problem.n_heads_kv;
        const int n_keys = TRAITS.varlen ? typical_keys(problem) : problem.seq_len_k;
        const int64_t kv_bytes = int64_t(n_keys) * Kernel::d_head * 2 * kElementBytes;
        return {
            .Q = problem.q,
            .K = problem.k,
            .V = problem.v,
            .O = problem.o,
            .lse = problem.lse,
            .Q_strides = problem.q_strides,
            .K_strides = problem.k_strides,
            .V_strides = problem.v_strides,
            .O_strides = problem.o_strides,
            .grid = {.n_q_blocks = ceil_div(problem.seq_len_q, Kernel::B_r),
                     .n_heads = problem.n_heads,
                     .total_heads = total_heads,
                     .section_heads = section_width(kv_bytes / heads_per_kv_head, total_heads)},
            .heads_per_kv_head = heads_per_kv_head,
            .seq_len_q = problem.seq_len_q,
            .seq_len_k = problem.seq_len_k,
            .scale = TRAITS.softcap
                         ? make_capped_softmax_scale(problem.softmax_scale, problem.softcap)
                         : make_softmax_scale(problem.softmax_scale,
                                              CFG.optimized_softmax && !Kernel::mod_changes_scores),
            .window_left = problem.window_left,
            .window_right = problem.window_right,
            .sinks = problem.sinks,
            .cu_seqlens_q = problem.cu_seqlens_q,
            .cu_seqlens_k = problem.cu_seqlens_k,
            .seqused_k = problem.seqused_k,
            .total_q = problem.total_q,
            .rows_q = nameable_rows(problem.total_q),
            .rows_k = nameable_rows(problem.total_k),
            .n_splits = problem.n_splits,
            .partial_o = problem.partial_o,
            .partial_lse = problem.partial_lse,
            .d_head = problem.d_head,
            .d_head_v = problem.d_head_v,
            .block_table = problem.block_table,
            .max_pages = problem.max_pages,
            .n_pages = problem.n_pages,
            .page_size = PageSize::of(TRAITS.paged ? problem.page_size : 1),
            .kept_sums = problem.kept_sums,
        };
    }

    // Whether a thread block takes several chunks of keys, and keeps what they leave. What a launch knows of
    // packed sequences is that none is longer than all together.
    static bool keeps_chunks(const ForwardProblem &problem) {
        if (Kernel::chunk_tiles == 0) return false;
        const int chunk_keys = max_of(Kernel::chunk_tiles, 1) * Kernel::B_c;
        return ceil_div(problem.seq_len_k, chunk_keys) > (TRAITS.split ? problem.n_splits : 1);
    }

    // Thread blocks that run at a time. No more of an SM than there is memory for to keep chunks in.
    static cudaError_t running_blocks(int &n_sms, int &n_blocks) {
        int per_sm = 0;
        cudaError_t error = sm_count(n_sms);
        if (error != cudaSuccess) return error;
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel(), Kernel::n_threads,
                                                              Kernel::smem_bytes);
        if (Kernel::chunk_tiles > 0) per_sm = min_of(per_sm, kKeptBlocks);
        n_blocks = n_sms * max_of(per_sm, 1);
        return error;
    }

    // The counter from which the blocks of a launch take their work.
    static cudaError_t acquire_counter(cudaStream_t stream, SchedulerCounter *&counter) {
        SchedulerCounters *counters = nullptr;
        const cudaError_t error = SchedulerCounters::of_current_device(counters);
        return error == cudaSuccess ? counters->acquire(stream, counter) : error;
    }

    // Lets the kernel use its shared memory on the current device; once for each device.
    static int load() {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::smem_bytes);
        if (error != cudaSuccess) cudaGetLastError();  // reported here: the next launch starts afresh
        if constexpr (TRAITS.planned || Kernel::chunk_tiles > 0) {
            SchedulerCounters *counters = nullptr;
            if (error != cudaSuccess) return error;
            const cudaError_t device_error = SchedulerCounters::of_current_device(counters);
            return device_error == cudaSuccess ? counters->prepare() : device_error;
        }
        return error;
    }

    // An empty output is no error and launches nothing.
    template <int kTarget>
    static int launch(const ForwardProblem &problem, void *stream) {
        if constexpr (is_mod<MOD>) {
            if (problem.mod == nullptr) return cudaErrorInvalidValue;
            return launch_with<kTarget>(problem, Args{make_args(problem), mod_of_launch<MOD>(*problem.mod)},
                                        stream);
        } else {
            return launch_with<kTarget>(problem, make_args(problem), stream);
        }
    }

    template <int kTarget>
    static int launch_with(const ForwardProblem &problem, Args args, void *stream) {
        const int64_t total_heads = int64_t(problem.batch) * problem.n_heads;
        int64_t blocks = total_heads * ceil_div(problem.seq_len_q, Kernel::B_r);
        if (blocks == 0) return cudaSuccess;
        if (!traits_allow(problem)) return cudaErrorInvalidValue;
        if constexpr (TRAITS.planned) {
            return launch_planned<kTarget>(problem, args, static_cast<cudaStream_t>(stream));
        }
        if (TRAITS.split) blocks *= problem.n_splits;
        // Sums of rounded P are good enough for O, not for the LSE.
        if (CFG.tensor_row_sums && problem.lse != nullptr) return cudaErrorNotSupported;
        if (total_heads > kMaxBlocks || blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
        if constexpr (Kernel::chunk_tiles > 0) {
            if (keeps_chunks(problem)) {
                int n_sms = 0, running = 0;
                if (const cudaError_t error = running_blocks(n_sms, running)) return error;
                if (blocks > running) {
                    blocks = running;
                    const cudaError_t error =
                        acquire_counter(static_cast<cudaStream_t>(stream), args.counter);
                    if (error != cudaSuccess) return error;
                }
            }
        }
        void *parameters[] = {&args};
        // Unlike <<<>>> and a look at the last error, this reports no earlier call's failure.
        constexpr bool early = TRAITS.split && kTarget >= 90;
        const cudaError_t error =
            launch_kernel<early>(kernel(), static_cast<unsigned>(blocks), Kernel::n_threads,
                                 Kernel::smem_bytes, static_cast<cudaStream_t>(stream), parameters);
        if (error != cudaSuccess) cudaGetLastError();  // reported here: the next launch starts afresh
        if constexpr (TRAITS.split) {
            if (error != cudaSuccess) return error;
            if constexpr (Kernel::chunk_tiles > 0) {
                return launch_chunk_combine<Kernel::dtype, TRAITS, kTarget>(
                    problem, unseen(args), static_cast<cudaStream_t>(stream));
            } else {
                return launch_split_combine<Kernel::dtype, Kernel::d_head, TRAITS, kTarget>(
                    problem, static_cast<cudaStream_t>(stream));
            }
        }
        return error;
    }

    // Persistent blocks, as many as run at a time: how many items there are, only the device knows.
    template <int kTarget>
    static cudaError_t launch_planned(const ForwardProblem &problem, Args args, cudaStream_t stream) {
        int n_sms = 0, n_blocks = 0;
        cudaError_t error = running_blocks(n_sms, n_blocks);
        if (error != cudaSuccess) return error;
        args.planned = planned_launch(problem, Kernel::B_r, 2 * Kernel::d_head * kElementBytes);
        args.output = planned_output(problem, TRAITS.sinks);
        error = acquire_counter(stream, args.counter);
        if (error != cudaSuccess) return error;
        void *parameters[] = {&args};
        error = launch_kernel<kTarget >= 90>(kernel(), static_cast<unsigned>(n_blocks), Kernel::n_threads,
                                             Kernel::smem_bytes, stream, parameters);
        if (error != cudaSuccess) {
            cudaGetLastError();  // reported here: the next launch starts afresh
            return error;
        }
        return launch_planned_combine<Kernel::dtype, TRAITS, Kernel::B_c, kTarget, Kernel::chunk_tiles>(
            problem, args.planned, n_sms, stream, unseen(args));
    }

    // The exponent of a row that has seen no key.
    static float unseen(const ForwardKernelArgs &args) {
        return args.scale.lowest * args.scale.exponent_factor;
    }

    // What would make a kernel with traits compute nonsense or touch memory that is not the tensors'.
    static bool traits_allow(const ForwardProblem &problem) {
        // Bounds of a mod's values count on shorter ones, too (flash_helpers/mods/intervals.py).
        if ((TRAITS.window || is_mod<MOD>) &&
            (problem.seq_len_q > kMaxWindowedLength || problem.seq_len_k > kMaxWindowedLength)) {
            return false;
        }
        if (problem.n_sms != 0) return false;  // its grids take whatever SM is free
        if (keeps_chunks(problem) && problem.kept_sums == nullptr) return false;
        if (problem.o_float32 && !TRAITS.split && !TRAITS.planned) return false;
        if (problem.seqused_q != nullptr && !TRAITS.planned) return false;
        if (TRAITS.planned) {
            const int group = heads_as_rows(problem.n_heads / problem.n_heads_kv, Kernel::B_r);
            if (!plan_allows(problem, Kernel::B_r / group)) return false;
        }
        if (TRAITS.softcap && !(problem.softcap > 0)) return false;
        if (TRAITS.sinks && problem.sinks == nullptr) return false;
        if (TRAITS.split && (problem.n_splits < 1 || problem.n_splits > kMaxSplits ||
                             problem.partial_o == nullptr || problem.partial_lse == nullptr)) {
            return false;
        }
        if (TRAITS.paged && (problem.block_table == nullptr || problem.page_size < 1 ||
                             problem.seq_len_k != int64_t(problem.max_pages) * problem.page_size ||
                             problem.cu_seqlens_k != nullptr)) {
            return false;
        }
        return !TRAITS.padded_head ||
               (problem.d_head % kChunkElements == 0 && problem.d_head_v % kChunkElements == 0);
    }

    static int attributes(KernelAttributes &out) {
        cudaFuncAttributes a;
        if (const cudaError_t error = cudaFuncGetAttributes(&a, kernel())) return error;
        out = {.registers = a.numRegs,
               .local_bytes = static_cast<int>(a.localSizeBytes),
               .static_smem_bytes = static_cast<int>(a.sharedSizeBytes),
               .max_threads_per_block = a.maxThreadsPerBlock,
               .blocks_per_sm = 0};
        return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&out.blocks_per_sm, kernel(), Kernel::n_threads,
                                                             Kernel::smem_bytes);
    }
};

template <FlashForwardKernelConfig CFG, ForwardTraits TRAITS, int kTarget, typename MOD = NoMod>
constexpr ForwardKernelRecord<FlashForwardKernelConfig> make_record() {
    using Launcher = ForwardLauncher<CFG, TRAITS, MOD>;
    return {
        .config = CFG,
        .traits = TRAITS,
        .target = kTarget,
        .n_threads = Launcher::Kernel::n_threads,
        .smem_bytes = Launcher::Kernel::smem_bytes,
        .load = &Launcher::load,
        .launch = &Launcher::template launch<kTarget>,
        .attributes = &Launcher::attributes,
        .mod = signature_of<MOD>(),
        .find_tiles = tile_finder<typename Launcher::Kernel>(),
    };
}

}  // namespace flash::ampere
