// The host side of one backward kernel: arguments from a problem, the launches of a pass, resources.
#pragma once

#include <cuda_runtime.h>

#include <limits>

#include "ampere/backward/kernel.cuh"
#include "common/backward/convert_dq.cuh"
#include "common/backward/prepare.cuh"

namespace flash::ampere {

template <FlashBackwardKernelConfig CFG, BackwardTraits TRAITS>
struct BackwardLauncher {
    using Kernel = StaticBackwardKernelConfig<CFG, TRAITS>;

    static constexpr int turns_per_group =
        CFG.dq_sum == DQSum::ORDERED ? kSumRows / Kernel::B_r * Kernel::dq_warps : 0;

    static const void *kernel() {
        return reinterpret_cast<const void *>(&flash_backward_kernel<CFG, TRAITS>);
    }

    static BackwardKernelArgs make_args(const BackwardProblem &problem) {
        const int total_heads = problem.batch * problem.n_heads_kv;
        const int heads_per_kv_head = problem.n_heads / problem.n_heads_kv;
        // What the blocks of a head share: Q and dO of its group, and the sums of dQ.
        const int64_t head_bytes = int64_t(problem.seq_len_q) * heads_per_kv_head *
                                   ((Kernel::d_head + Kernel::d_head_v) * kElementBytes + Kernel::d_head * 4);
        const SoftmaxScale scale = TRAITS.softcap
                                       ? make_capped_softmax_scale(problem.softmax_scale, problem.softcap)
                                       : SoftmaxScale{problem.softmax_scale * kLog2e, 1.0f, 0.0f, false};
        return {
            .Q = problem.q,
            .K = problem.k,
            .V = problem.v,
            .dO = problem.dout,
            .dK = problem.dk,
            .dV = problem.dv,
            .lse_log2 = problem.lse_log2,
            .delta = problem.delta,
            .dQ_sums = problem.dq == nullptr ? nullptr : problem.dq_sums,
            .turns = problem.counters,
            .Q_strides = problem.q_strides,
            .K_strides = problem.k_strides,
            .V_strides = problem.v_strides,
            .dO_strides = problem.dout_strides,
            .dK_strides = problem.dk_strides,
            .dV_strides = problem.dv_strides,
            .grid = {.n_q_blocks = ceil_div(problem.seq_len_k, Kernel::B_c),
                     .n_heads = problem.n_heads_kv,
                     .total_heads = total_heads,
                     .section_heads = section_width(head_bytes, total_heads)},
            .n_heads = problem.n_heads,
            .heads_per_kv_head = heads_per_kv_head,
            .seq_len_q = problem.seq_len_q,
            .seq_len_k = problem.seq_len_k,
            .score_factor = scale.score_factor,
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

    // Times the factor of the exponents it is -inf; a factor of 0 would make NaN of that, so it is not 0.
    static float hidden_score(const SoftmaxScale &scale) {
        const float infinity = std::numeric_limits<float>::infinity();
        return !TRAITS.softcap && scale.score_factor < 0 ? infinity : -infinity;
    }

    static int load() {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::smem_bytes);
        if (error != cudaSuccess) cudaGetLastError();
        return error;
    }

    static int launch(const BackwardProblem &problem, void *stream_pointer) {
        const auto stream = static_cast<cudaStream_t>(stream_pointer);
        const int64_t blocks =
            int64_t(problem.batch) * problem.n_heads_kv * ceil_div(problem.seq_len_k, Kernel::B_c);
        if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
        cudaError_t error = launch_prepare_backward<Kernel::dtype>(problem, Kernel::d_head, turns_per_group, stream);
        if (error == cudaSuccess && blocks > 0) {
            BackwardKernelArgs args = make_args(problem);
            if (args.score_factor == 0) args.score_factor = FLT_MIN;
            void *parameters[] = {&args};
            error = cudaLaunchKernel(kernel(), dim3(static_cast<unsigned>(blocks)), dim3(Kernel::n_threads),
                                     parameters, Kernel::smem_bytes, stream);
        }
        if (error == cudaSuccess) error = launch_convert_dq<Kernel::dtype, Kernel::d_head>(problem, stream);
        if (error != cudaSuccess) cudaGetLastError();
        return error;
    }
};

}  // namespace flash::ampere
