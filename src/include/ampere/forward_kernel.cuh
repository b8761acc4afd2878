// FlashAttention-2 forward: O = softmax(scale * Q K^T) V, with the log-sum-exp of every row on request.
//
// One thread block computes B_r queries of one head; each of its warps owns B_r / n_warps of them. It
// walks over the blocks of B_c keys from the last visible one to the first, so that the blocks that
// need a mask come first:
//
//     K/V block   0        …       n_steady-1  n_steady  …    n_visible-1
//                 |←───── no mask ───────────|←── general ──────────────| start here
//
// General blocks have a mask where one is needed, and take the softmax's reference from their maximum; a
// reference that is not the maximum (softmax.cuh) is therefore good for every row when the steady blocks
// begin. S, P and O stay in registers; Q, K and V pass through shared memory (pipeline.cuh).
#pragma once

#include "ampere/epilogue.cuh"
#include "ampere/gemm.cuh"
#include "ampere/load_store.cuh"
#include "ampere/pipeline.cuh"
#include "ampere/softmax.cuh"
#include "ampere/static_kernel_configuration.cuh"
#include "block_coordinates.cuh"
#include "mask.cuh"

namespace flash::ampere {

struct ForwardKernelArgs {
    const void *Q;  // (batch, seq_len_q, n_heads, d_head)
    const void *K;  // (batch, seq_len_k, n_heads_kv, d_head)
    const void *V;  // (batch, seq_len_k, n_heads_kv, d_head)
    void *O;        // (batch, seq_len_q, n_heads, d_head)
    float *lse;     // (batch, n_heads, seq_len_q) or nullptr
    TensorStrides Q_strides, K_strides, V_strides, O_strides;
    GridShape grid;
    int heads_per_kv_head;
    int seq_len_q, seq_len_k;
    SoftmaxScale scale;
};

// What a warp holds while its thread block works on one Q block.
template <typename Kernel>
struct ForwardWarp {
    const Mask<Kernel::traits> mask;
    const int first_row;   // the warp's first query
    const int last_block;  // the K/V block that is visited first
    Pipeline<Kernel> pipeline;
    QueryOperand<Kernel> Q;                      // (warp_rows, d_head)
    const ScoreProduct<Kernel> score_product;    // S = Q K^T
    const OutputProduct<Kernel> output_product;  // O += P V
    OnlineSoftmax<Kernel> softmax;
    Output<Kernel> O;  // (warp_rows, d_head), not yet divided by l

    // Q and the first K/V blocks are under way.
    FLASH_DEVICE void prepare_Q() {
        const bool negate = Kernel::cfg.optimized_softmax && softmax.scale.negate_Q;
        if (!Pipeline<Kernel>::waits_for_Q && !Kernel::holds_Q && !negate) return;
        pipeline.wait_for_Q();
        if (negate) Q.negate();
        if constexpr (Kernel::holds_Q) Q.hold();
    }

    // kGeneral: some query may not see some key, maybe because the keys end within the block.
    template <bool kGeneral>
    FLASH_DEVICE void process_kv_block(int kv_block) {
        const int first_key = kv_block * Kernel::B_c;
        const int valid_keys = mask.seq_len_k - first_key;
        // Under a causal mask the rows of some warps end before the block.
        const bool sees_block = !kGeneral || !Kernel::traits.causal ||
                                mask.visible_end(first_row + Kernel::warp_rows - 1) > first_key;
        Scores<Kernel> S;  // (warp_rows, B_c)

        pipeline.template before_scores<kGeneral>(valid_keys);
        if (sees_block) score_product(S, Q, pipeline.offset());
        pipeline.template after_scores<kGeneral>(valid_keys);
        if (sees_block) {
            softmax.scale_scores(S);
            if constexpr (kGeneral) hide_invisible(S, first_key);
            softmax.template update<kGeneral>(S, O, kv_block == last_block);
            output_product(
                O, [&](int key_tile) { return softmax.template probabilities<kGeneral>(S, key_tile); },
                pipeline.offset());
        }
        pipeline.after_output();
    }

  private:
    // Scores of keys that a query does not see become -inf.
    FLASH_DEVICE void hide_invisible(Scores<Kernel> &S, int first_key) const {
        if (mask.visible_end(first_row) >= first_key + Kernel::B_c) return;  // no row of the warp ends here
        const int lane = computed_here(threadIdx.x % kWarpSize);
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const MatrixCoordinate at = accumulator(lane, i);
                const int end = mask.visible_end(first_row + m * kMmaM + at.row) - first_key - at.column;
#pragma unroll
                for (int n = 0; n < Kernel::B_c / kMmaN; ++n) {
                    if (n * kMmaN >= end) S.rmem[m][n][i] = -INFINITY;
                }
            }
        }
    }
};

// K/V blocks that the steady loop takes: every query of the thread block sees all of their keys and, if the
// softmax's reference is not the maximum, has seen another key before.
template <typename Kernel>
FLASH_DEVICE int count_steady_blocks(const Mask<Kernel::traits> &mask, int first_row) {
    if constexpr (Kernel::approximate_reference) {
        return max_of(mask.visible_end(first_row) - 1, 0) / Kernel::B_c;
    } else {
        return mask.n_full_blocks(first_row, Kernel::B_c);
    }
}

// Computes the Q block of this thread block. Returns whether scores have outgrown an anchored reference, as
// far as this thread sees; what was stored then is not right.
template <typename Kernel>
FLASH_DEVICE bool compute_q_block(const ForwardKernelArgs &args) {
    extern __shared__ __align__(128) char smem_begin[];
    const uint32_t smem = smem_address(smem_begin);
    const int warp = uniform(threadIdx.x / kWarpSize);
    const int lane = threadIdx.x % kWarpSize;

    const auto [batch, head, q_block] = args.grid.decode<Kernel::traits.causal>(blockIdx.x);
    const int kv_head = head / args.heads_per_kv_head;
    const GlobalMatrix gmem_Q(args.Q, args.Q_strides, batch, head);     // (seq_len_q, d_head)
    const GlobalMatrix gmem_K(args.K, args.K_strides, batch, kv_head);  // (seq_len_k, d_head)
    const GlobalMatrix gmem_V(args.V, args.V_strides, batch, kv_head);  // (seq_len_k, d_head)

    const Mask<Kernel::traits> mask{args.seq_len_q, args.seq_len_k};
    const int q_row = q_block * Kernel::B_r;  // first query of the thread block
    const int q_rows = min_of(Kernel::B_r, args.seq_len_q - q_row);
    const int n_visible_blocks = mask.n_visible_blocks(q_row + q_rows - 1, Kernel::B_c);
    const int n_steady_blocks = min_of(count_steady_blocks<Kernel>(mask, q_row), n_visible_blocks);
    const int last_key_row = (n_visible_blocks - 1) * Kernel::B_c;
    const int warp_row = warp * Kernel::warp_rows;

    if (n_visible_blocks > 0) {
        TileLoader<Kernel, typename Kernel::QTile> Q_loader(gmem_Q, q_row, smem + Kernel::smem_Q);
        Q_loader.template load<true>(q_rows);
    }
    const KVSource<Kernel> source{
        .K = {gmem_K, last_key_row, smem + Kernel::smem_K},
        .V = {gmem_V, last_key_row, smem + Kernel::smem_V},
        .blocks_left = n_visible_blocks,
    };
    ForwardWarp<Kernel> state{
        .mask = mask,
        .first_row = q_row + warp_row,
        .last_block = n_visible_blocks - 1,
        .pipeline = {source, smem + Kernel::smem_barriers},
        .Q = {smem + Kernel::smem_Q, warp, lane},
        .score_product = {smem + Kernel::smem_K, lane},
        .output_product = {smem + Kernel::smem_V, lane},
        .softmax = OnlineSoftmax<Kernel>(args.scale),
    };
    state.O.clear();

    if (n_visible_blocks > 0) {
        int kv_block = n_visible_blocks - 1;
        state.pipeline.start(args.seq_len_k - kv_block * Kernel::B_c);
        state.prepare_Q();
#pragma unroll 1
        for (; kv_block >= n_steady_blocks; --kv_block) state.template process_kv_block<true>(kv_block);
#pragma unroll 1
        for (; kv_block >= 0; --kv_block) state.template process_kv_block<false>(kv_block);
    }

    // Which block this is is found out again, so that the loops need no registers for it.
    const BlockCoordinates at = args.grid.decode<Kernel::traits.causal>(computed_here(blockIdx.x));
    float *lse = args.lse;  // (seq_len_q)
    if (lse != nullptr) lse += (int64_t(at.batch) * args.grid.n_heads + at.head) * args.seq_len_q;
    const GlobalMatrix gmem_O(args.O, args.O_strides, at.batch, at.head);  // (seq_len_q, d_head)
    const Epilogue<Kernel> epilogue{
        .smem_O = smem + Kernel::smem_Q,
        .warp_row = warp_row,
        .first_row = at.q_block * Kernel::B_r + warp_row,
        .mask = mask,
    };
    epilogue.store(state.O, state.softmax, gmem_O, lse);
    return Kernel::cfg.softmax_reference == SoftmaxReference::ANCHORED && state.softmax.left_safe_range();
}

// The same kernel with every block's maximum as its reference; in smaller steps, for which no registers
// need to be spilled.
FLASH_HOST_DEVICE constexpr FlashForwardKernelConfig with_exact_softmax(FlashForwardKernelConfig config) {
    config.softmax_reference = SoftmaxReference::EXACT_SKIP_RESCALE;
    config.B_c = 32;
    config.mbarrier = false;
    return config;
}

// A function of its own, so that this rarely needed code costs the other no registers.
template <FlashForwardKernelConfig CFG, ForwardTraits TRAITS>
__device__ __noinline__ void recompute_q_block(const ForwardKernelArgs &args) {
    compute_q_block<StaticForwardKernelConfig<with_exact_softmax(CFG), TRAITS>>(args);
}

template <FlashForwardKernelConfig CFG, ForwardTraits TRAITS>
__global__ void __launch_bounds__(StaticForwardKernelConfig<CFG, TRAITS>::n_threads,
                                  StaticForwardKernelConfig<CFG, TRAITS>::min_blocks_per_sm)
    flash_forward_kernel(const __grid_constant__ ForwardKernelArgs args) {
    const bool left_safe_range = compute_q_block<StaticForwardKernelConfig<CFG, TRAITS>>(args);
    if constexpr (CFG.softmax_reference == SoftmaxReference::ANCHORED) {
        // Nobody reads shared memory any more, and what was stored is overwritten after it was written.
        if (__syncthreads_or(left_safe_range)) recompute_q_block<CFG, TRAITS>(args);
    }
}

}  // namespace flash::ampere
