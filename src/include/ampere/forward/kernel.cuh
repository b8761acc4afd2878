// FlashAttention-2 forward: O = softmax(scale * Q K^T) V, with the log-sum-exp of every row on request.
//
// One thread block computes B_r queries of one head (q_block.cuh), or some of these one after the other
// (row_blocks.cuh), or items of planned work (planned_blocks.cuh); each of its warps, or pairs of warps, owns
// an equal share of the queries (warp.cuh). S, P and O stay in registers; Q, K and V pass through shared
// memory (pipeline.cuh).
#pragma once

#include "ampere/forward/planned_blocks.cuh"
#include "ampere/forward/q_block.cuh"
#include "common/rows_of_none.cuh"

namespace flash::ampere {

// A function of its own, so that this rarely needed code costs the other no registers.
template <FlashForwardKernelConfig CFG, ForwardTraits TRAITS>
__device__ __noinline__ void recompute_q_block(const ForwardKernelArgs &args) {
    using Exact = StaticForwardKernelConfig<with_exact_softmax(CFG), TRAITS>;
    static_assert(Exact::smem_bytes <= StaticForwardKernelConfig<CFG, TRAITS>::smem_bytes,
                  "what runs again has the shared memory of the launch");
    compute_q_block<Exact>(args);
}

template <FlashForwardKernelConfig CFG, ForwardTraits TRAITS>
__global__ void __launch_bounds__(StaticForwardKernelConfig<CFG, TRAITS>::n_threads,
                                  StaticForwardKernelConfig<CFG, TRAITS>::min_blocks_per_sm)
    flash_forward_kernel(const __grid_constant__ ForwardKernelArgs args) {
    if constexpr (TRAITS.planned) {
        run_planned_items<StaticForwardKernelConfig<CFG, TRAITS>>(args);
    } else {
        if constexpr (TRAITS.varlen && !TRAITS.split) {
            const int n_chunks = (TRAITS.padded_head ? args.d_head_v : CFG.d_head) / kChunkElements;
            clear_rows_of_none(args, args.O, args.O_strides, args.grid.total_heads / args.grid.n_heads,
                               args.grid.n_heads, n_chunks, computed_here(threadIdx.x), blockDim.x);
        }
        using Kernel = StaticForwardKernelConfig<CFG, TRAITS>;
        if constexpr (Kernel::chunk_tiles > 0) {
            each_row_block<Kernel>(args, [&] { compute_q_block<Kernel>(args); });
        } else {
            const bool left_safe_range = compute_q_block<Kernel>(args);
            if constexpr (CFG.softmax_reference == SoftmaxReference::ANCHORED) {
                // Nobody reads shared memory any more, and what was stored is overwritten after it was
                // written.
                if (__syncthreads_or(left_safe_range)) recompute_q_block<CFG, TRAITS>(args);
            }
        }
    }
}

// The same with functions of the user's. Its reference is always the maximum: nothing is computed again.
template <FlashForwardKernelConfig CFG, ForwardTraits TRAITS, typename MOD>
__global__ void __launch_bounds__(StaticForwardKernelConfig<CFG, TRAITS, MOD>::n_threads,
                                  StaticForwardKernelConfig<CFG, TRAITS, MOD>::min_blocks_per_sm)
    flash_forward_mod_kernel(const __grid_constant__ KernelArgs<MOD> args) {
    if constexpr (TRAITS.varlen && !TRAITS.split) {
        const int n_chunks = (TRAITS.padded_head ? args.d_head_v : CFG.d_head) / kChunkElements;
        clear_rows_of_none(args, args.O, args.O_strides, args.grid.total_heads / args.grid.n_heads,
                           args.grid.n_heads, n_chunks, computed_here(threadIdx.x), blockDim.x);
    }
    compute_q_block<StaticForwardKernelConfig<CFG, TRAITS, MOD>>(args);
}

}  // namespace flash::ampere
