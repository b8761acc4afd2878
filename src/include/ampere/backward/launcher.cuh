// The host side of one backward kernel: arguments from a problem, workspaces, the launches of a pass,
// resources, and its record.
//
// A generated translation unit includes this file and defines one record with make_backward_record.
#pragma once

#include <cuda_runtime.h>

#include <limits>

#include "ampere/backward/dq_kernel.cuh"
#include "ampere/backward/kernel.cuh"
#include "common/backward/captured_gradients.cuh"
#include "common/backward/convert_dq.cuh"
#include "common/backward/prepare.cuh"
#include "common/early_launch.cuh"

namespace flash::ampere {

template <FlashBackwardKernelConfig CFG, BackwardTraits TRAITS, typename MOD, bool kMakesDQItself>
struct QueryKernelOf {
    using type = StaticBackwardKernelConfig<CFG, TRAITS, MOD>;
};
template <FlashBackwardKernelConfig CFG, BackwardTraits TRAITS, typename MOD>
struct QueryKernelOf<CFG, TRAITS, MOD, true> {
    using type = StaticQueryGradientConfig<CFG, TRAITS, MOD>;
};

template <FlashBackwardKernelConfig CFG, BackwardTraits TRAITS, typename MOD = NoMod>
struct BackwardLauncher {
    using Kernel = StaticBackwardKernelConfig<CFG, TRAITS, MOD>;
    using Args = BackwardArgs<MOD>;

    // Of the kernel that makes dQ by itself; without one any type that has B_r will do.
    static constexpr bool makes_dQ_itself = CFG.dq_sum == DQSum::OWN_KERNEL;
    using QueryKernel = typename QueryKernelOf<CFG, TRAITS, MOD, makes_dQ_itself>::type;

    static const void *kernel() {
        if constexpr (is_mod<MOD>) {
            return reinterpret_cast<const void *>(&flash_backward_mod_kernel<CFG, TRAITS, MOD>);
        } else {
            return reinterpret_cast<const void *>(&flash_backward_kernel<CFG, TRAITS>);
        }
    }

    static BackwardKernelArgs make_args(const BackwardProblem &problem) {
        const int total_heads = problem.batch * problem.n_heads_kv;
        const int heads_per_kv_head = problem.n_heads / problem.n_heads_kv;
        // What the blocks of a head share: Q and dO of its group, and the sums of dQ.
        const int64_t head_bytes = int64_t(problem.seq_len_q) * heads_per_kv_head *
                                   ((Kernel::d_head + Kernel::d_head_v) * kElementBytes + Kernel::d_head * 4);
        const int64_t kv_bytes = int64_t(problem.seq_len_k) * (Kernel::d_head + Kernel::d_head_v) *
                                 kElementBytes / heads_per_kv_head;
        const SoftmaxScale scale =
            TRAITS.softcap ? make_capped_softmax_scale(problem.softmax_scale, problem.softcap)
            : is_mod<MOD>  ? SoftmaxScale{problem.softmax_scale, kLog2e, 0.0f, false}
                           : SoftmaxScale{problem.softmax_scale * kLog2e, 1.0f, 0.0f, false};
        return {
            .Q = problem.q,
            .K = problem.k,
            .V = problem.v,
            .dO = problem.dout,
            .dQ = problem.dq,
            .dK = problem.dk,
            .dV = problem.dv,
            .lse_log2 = problem.lse_log2,
            .delta = problem.delta,
            .dQ_sums = problem.dq_sums,
            .Q_strides = problem.q_strides,
            .K_strides = problem.k_strides,
            .V_strides = problem.v_strides,
            .dO_strides = problem.dout_strides,
            .dQ_strides = in_words(problem.dq_strides, kWordsOfGradient<TRAITS.float_query_gradients>),
            .dK_strides = problem.dk_strides,
            .dV_strides = problem.dv_strides,
            .sum_tiles = row_tiles(problem),
            .grid = {.n_q_blocks = ceil_div(problem.seq_len_k, Kernel::B_c),
                     .n_heads = problem.n_heads_kv,
                     .total_heads = total_heads,
                     .section_heads = heads_in_turn(head_bytes, total_heads)},
            .query_grid = {.n_q_blocks = makes_dQ_itself ? ceil_div(problem.seq_len_q, QueryKernel::B_r) : 0,
                           .n_heads = problem.n_heads,
                           .total_heads = problem.batch * problem.n_heads,
                           .section_heads = section_width(kv_bytes, problem.batch * problem.n_heads)},
            .n_heads = problem.n_heads,
            .heads_per_kv_head = heads_per_kv_head,
            .seq_len_q = problem.seq_len_q,
            .seq_len_k = problem.seq_len_k,
            // Not 0: 0 times a hidden score, an infinity, would be NaN.
            .score_factor =
                scale.score_factor == 0 && !TRAITS.softcap && !is_mod<MOD> ? FLT_MIN : scale.score_factor,
            .exponent_factor = scale.exponent_factor,
            .hidden_score = hidden_score(scale),
            .softmax_scale = problem.softmax_scale,
            .window_left = problem.window_left,
            .window_right = problem.window_right,
            .cu_seqlens_q = problem.cu_seqlens_q,
            .cu_seqlens_k = problem.cu_seqlens_k,
            .seqused_q = problem.seqused_q,
            .seqused_k = problem.seqused_k,
            .total_q = problem.total_q,
            .total_k = problem.total_k,
            .rows_q = nameable_rows(problem.total_q),
            .rows_k = nameable_rows(problem.total_k),
            .d_head = problem.d_head,
            .d_head_v = problem.d_head_v,
        };
    }

    // Heads whose blocks start in turn. With ordered sums no more than the L2 cache holds: there blocks of
    // one head that run at once are so few, and so far apart, that the order costs little.
    static int heads_in_turn(int64_t head_bytes, int total_heads) {
        if constexpr (CFG.dq_sum != DQSum::ORDERED) return section_width(head_bytes, total_heads);
        constexpr int64_t l2_bytes = int64_t(32) << 20;
        const int64_t heads = l2_bytes / max_of(head_bytes, int64_t(1));
        return max_of(1, heads < total_heads ? static_cast<int>(heads) : total_heads);
    }

    // Times the factor of the exponents it is -inf; a factor of 0 would make NaN of that, so it is not 0.
    static float hidden_score(const SoftmaxScale &scale) {
        const float infinity = std::numeric_limits<float>::infinity();
        return !TRAITS.softcap && scale.score_factor < 0 ? infinity : -infinity;
    }

    static const void *query_kernel() {
        if constexpr (makes_dQ_itself && is_mod<MOD>) {
            return reinterpret_cast<const void *>(&flash_backward_dq_mod_kernel<CFG, TRAITS, MOD>);
        } else if constexpr (makes_dQ_itself) {
            return reinterpret_cast<const void *>(&flash_backward_dq_kernel<CFG, TRAITS>);
        } else {
            return nullptr;
        }
    }

    static int load() {
        cudaError_t error =
            cudaFuncSetAttribute(kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::smem_bytes);
        if (error == cudaSuccess && makes_dQ_itself) {
            error = cudaFuncSetAttribute(query_kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         QueryKernel::smem_bytes);
        }
        if (error == cudaSuccess) error = load_gathering<Kernel>();
        if (error != cudaSuccess) cudaGetLastError();  // reported here: the next launch starts afresh
        return error;
    }

    // From sm_90 on a kernel is set up while the one before it ends; the pre-pass begins when all else has
    // ended. The pre-pass, the kernel of dK and dV, and what makes dQ. A gradient that is not wanted, an
    // empty one too, costs no launch.
    template <int kTarget>
    static int launch(const BackwardProblem &problem, void *stream_pointer) {
        constexpr bool early = kTarget >= 90;
        if (!traits_allow(problem)) return cudaErrorInvalidValue;
        const auto stream = static_cast<cudaStream_t>(stream_pointer);
        constexpr bool ordered = CFG.dq_sum == DQSum::ORDERED;
        cudaError_t error = launch_find_tiles<MOD>(problem, stream);
        if (error != cudaSuccess) return error;
        error = launch_prepare_backward<Kernel::dtype, TRAITS>(
            problem,
            {.clears_sums = CFG.dq_sum == DQSum::ATOMIC,
             .part_rows = Kernel::dq_rows,
             .part_columns = kMmaTile,
             .parts_per_row = ordered ? Kernel::dq_column_warps : 0,
             .rows_per_tile = Kernel::B_r,
             .dq_words = kWordsOfGradient<TRAITS.float_query_gradients>,
             .lse_shift = probability_shift(Kernel::dtype)},
            stream);
        Args args = all_args(problem);
        const bool wants_keys = problem.dk != nullptr || problem.dv != nullptr;
        if (error == cudaSuccess && (wants_keys || (!makes_dQ_itself && problem.dq != nullptr))) {
            error = launch_blocks<early>(kernel(), int64_t(problem.batch) * problem.n_heads_kv,
                                         args.grid.n_q_blocks, Kernel::n_threads, Kernel::smem_bytes, args,
                                         stream);
        }
        if (error == cudaSuccess && problem.dq != nullptr) {
            if constexpr (makes_dQ_itself) {
                error = launch_blocks<early>(query_kernel(), int64_t(problem.batch) * problem.n_heads,
                                             args.query_grid.n_q_blocks, QueryKernel::n_threads,
                                             QueryKernel::smem_bytes, args, stream);
            } else if constexpr (!ordered) {
                error = launch_convert_dq<Kernel::dtype, Kernel::d_head, early, TRAITS.float_query_gradients>(
                    problem, stream, unshifted(Kernel::dtype));
            }
        }
        if (error == cudaSuccess) error = launch_gathering<Kernel>(problem, stream);
        if (error != cudaSuccess) cudaGetLastError();  // reported here: the next launch starts afresh
        return error;
    }

    static Args all_args(const BackwardProblem &problem) {
        if constexpr (is_mod<MOD>) {
            return {make_args(problem), mod_of_launch<MOD>(*problem.mod)};
        } else {
            return make_args(problem);
        }
    }

    // What would make a kernel with traits compute nonsense or touch memory that is not the tensors'.
    static bool traits_allow(const BackwardProblem &problem) {
        if (is_mod<MOD> && problem.mod == nullptr) return false;
        // Bounds of a mod's values count on shorter ones, too (flash_helpers/mods/intervals.py).
        if ((TRAITS.window || is_mod<MOD>) &&
            (problem.seq_len_q > kMaxWindowedLength || problem.seq_len_k > kMaxWindowedLength)) {
            return false;
        }
        if (TRAITS.softcap && !(problem.softcap > 0)) return false;
        return !TRAITS.padded_head ||
               (problem.d_head % kChunkElements == 0 && problem.d_head_v % kChunkElements == 0);
    }

    static BackwardWorkspaces workspaces(const BackwardProblem &problem) {
        const bool packed = problem.cu_seqlens_q != nullptr;
        const int64_t rows =  // of all heads
            (packed ? problem.total_q : int64_t(problem.batch) * problem.seq_len_q) * problem.n_heads;
        if (makes_dQ_itself || problem.dq == nullptr) return {.lse_log2 = rows * int64_t(sizeof(float))};
        return {.lse_log2 = rows * int64_t(sizeof(float)),
                .dq_sums = dq_sum_floats(problem) * int64_t(sizeof(float))};
    }

    // Of the kernel of dK and dV, which makes dQ or takes longer than the one that does.
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

  private:
    template <bool kEarly>
    static cudaError_t launch_blocks(const void *function, int64_t heads, int blocks_per_head, int n_threads,
                                     int smem_bytes, Args &args, cudaStream_t stream) {
        const int64_t blocks = heads * blocks_per_head;
        if (blocks == 0) return cudaSuccess;
        if (heads > kMaxBlocks || blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
        void *parameters[] = {&args};
        return launch_kernel<kEarly>(function, static_cast<unsigned>(blocks), n_threads, smem_bytes, stream,
                                     parameters);
    }
};

template <FlashBackwardKernelConfig CFG, BackwardTraits TRAITS, int kTarget, typename MOD = NoMod>
constexpr BackwardKernelRecord<FlashBackwardKernelConfig> make_backward_record() {
    using Launcher = BackwardLauncher<CFG, TRAITS, MOD>;
    return {
        .config = CFG,
        .traits = TRAITS,
        .target = kTarget,
        .n_threads = Launcher::Kernel::n_threads,
        .smem_bytes = Launcher::Kernel::smem_bytes,
        .load = &Launcher::load,
        .launch = &Launcher::template launch<kTarget>,
        .attributes = &Launcher::attributes,
        .workspaces = &Launcher::workspaces,
        .mod = signature_of<MOD>(),
    };
}

}  // namespace flash::ampere
