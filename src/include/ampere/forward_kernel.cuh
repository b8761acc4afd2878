// FlashAttention-2 forward: O = softmax(scale * Q K^T) V, with the log-sum-exp of every row on request.
//
// One thread block computes B_r queries of one head; each of its warps owns B_r / n_warps of them. It
// walks over the blocks of B_c keys from the last visible one to the first, so that the blocks that
// need a mask come first:
//
//     K/V block   0        …       n_full-1  n_full    …    n_visible-1
//                 |←───── no mask ─────────|←── mask ──────────────────| start here
//
// S, P and O stay in registers; Q, K and V pass through shared memory, one block each. Schedule of one
// K/V block, with `eager_load_blocks` (| is a barrier; copies run until the next wait at the barrier):
//
//     V(j) ──────────┐   K(j-1) ──────────────────┐
//   | S = Q K(j)^T   | softmax   O += P V(j)      |  …        without it: K(j), wait, S, V(j), wait, …
#pragma once

#include "ampere/epilogue.cuh"
#include "ampere/gemm.cuh"
#include "ampere/load_store.cuh"
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
    using Tile = typename Kernel::KVTile;

    const Mask<Kernel::traits> mask;
    const int first_row;   // the warp's first query
    const int last_block;  // the K/V block that is visited first
    TileLoader<Kernel, Tile> K_loader;
    TileLoader<Kernel, Tile> V_loader;
    QueryOperand<Kernel> Q;                      // (warp_rows, d_head)
    const ScoreProduct<Kernel> score_product;    // S = Q K^T
    const OutputProduct<Kernel> output_product;  // O += P V
    OnlineSoftmax<Kernel> softmax;
    Output<Kernel> O;  // (warp_rows, d_head), not yet divided by l

    static constexpr bool eager = Kernel::cfg.eager_load_blocks;

    // Q is complete in shared memory.
    FLASH_DEVICE void prepare_Q() {
        if constexpr (Kernel::cfg.optimized_softmax) {
            if (softmax.scale.negate_Q) Q.negate();
        }
        if constexpr (Kernel::holds_Q) Q.hold();
    }

    // kMasked: some query does not see some key, maybe because the keys end within the block.
    template <bool kMasked>
    FLASH_DEVICE void process_kv_block(int kv_block) {
        const int first_key = kv_block * Kernel::B_c;
        const int valid_keys = mask.seq_len_k - first_key;

        if constexpr (!eager) K_loader.template load<kMasked>(valid_keys);
        wait_for_copies<Kernel>();
        __syncthreads();  // K is complete; all warps are done with the V block before it
        if constexpr (eager) V_loader.template load<kMasked>(valid_keys);

        Scores<Kernel> S;  // (warp_rows, B_c)
        score_product(S, Q);

        if constexpr (!eager) V_loader.template load<kMasked>(valid_keys);
        wait_for_copies<Kernel>();
        __syncthreads();  // V is complete; all warps are done with K
        if constexpr (eager) {
            if (kv_block > 0) K_loader.template load<false>(Kernel::B_c);
        }

        softmax.scale_scores(S);
        if constexpr (kMasked) hide_invisible(S, first_key);
        softmax.update_max(S, O, kv_block == last_block);
        output_product(O, [&](int key_tile) { return softmax.probabilities(S, key_tile); });
    }

  private:
    // Scores of keys that a query does not see become -inf.
    FLASH_DEVICE void hide_invisible(Scores<Kernel> &S, int first_key) const {
        const int lane = threadIdx.x % kWarpSize;
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

template <FlashForwardKernelConfig CFG, ForwardTraits TRAITS>
__global__ void __launch_bounds__(StaticForwardKernelConfig<CFG, TRAITS>::n_threads,
                                  StaticForwardKernelConfig<CFG, TRAITS>::min_blocks_per_sm)
    flash_forward_kernel(const __grid_constant__ ForwardKernelArgs args) {
    using Kernel = StaticForwardKernelConfig<CFG, TRAITS>;
    extern __shared__ __align__(128) char smem_begin[];
    const uint32_t smem = smem_address(smem_begin);
    const int warp = threadIdx.x / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;

    const auto [batch, head, q_block] = args.grid.decode<TRAITS.causal>(blockIdx.x);
    const int kv_head = head / args.heads_per_kv_head;
    const GlobalMatrix gmem_Q(args.Q, args.Q_strides, batch, head);     // (seq_len_q, d_head)
    const GlobalMatrix gmem_K(args.K, args.K_strides, batch, kv_head);  // (seq_len_k, d_head)
    const GlobalMatrix gmem_V(args.V, args.V_strides, batch, kv_head);  // (seq_len_k, d_head)

    const Mask<TRAITS> mask{args.seq_len_q, args.seq_len_k};
    const int q_row = q_block * Kernel::B_r;  // first query of the thread block
    const int q_rows = min_of(Kernel::B_r, args.seq_len_q - q_row);
    const int n_visible_blocks = mask.n_visible_blocks(q_row + q_rows - 1, Kernel::B_c);
    const int n_full_blocks = min_of(mask.n_full_blocks(q_row, Kernel::B_c), n_visible_blocks);
    const int last_key_row = (n_visible_blocks - 1) * Kernel::B_c;
    const int warp_row = warp * Kernel::warp_rows;

    ForwardWarp<Kernel> state{
        .mask = mask,
        .first_row = q_row + warp_row,
        .last_block = n_visible_blocks - 1,
        .K_loader = {gmem_K, last_key_row, smem + Kernel::smem_K},
        .V_loader = {gmem_V, last_key_row, smem + Kernel::smem_V},
        .Q = {smem + Kernel::smem_Q, warp, lane},
        .score_product = {smem + Kernel::smem_K, lane},
        .output_product = {smem + Kernel::smem_V, lane},
        .softmax = OnlineSoftmax<Kernel>(args.scale),
    };
    state.O.clear();

    if (n_visible_blocks > 0) {
        int kv_block = n_visible_blocks - 1;
        TileLoader<Kernel, typename Kernel::QTile> Q_loader(gmem_Q, q_row, smem + Kernel::smem_Q);
        Q_loader.template load<true>(q_rows);
        if constexpr (CFG.eager_load_blocks) {
            state.K_loader.template load<true>(args.seq_len_k - kv_block * Kernel::B_c);
        }
        wait_for_copies<Kernel>();
        __syncthreads();  // Q is complete
        state.prepare_Q();
#pragma unroll 1
        for (; kv_block >= n_full_blocks; --kv_block) state.template process_kv_block<true>(kv_block);
#pragma unroll 1
        for (; kv_block >= 0; --kv_block) state.template process_kv_block<false>(kv_block);
    }

    float *lse = args.lse;  // (seq_len_q)
    if (lse != nullptr) lse += (int64_t(batch) * args.grid.n_heads + head) * args.seq_len_q;
    const GlobalMatrix gmem_O(args.O, args.O_strides, batch, head);  // (seq_len_q, d_head)
    const Epilogue<Kernel> epilogue{
        .smem_O = smem + Kernel::smem_Q,
        .warp_row = warp_row,
        .first_row = state.first_row,
        .mask = mask,
    };
    epilogue.store(state.O, state.softmax, gmem_O, lse);
}

}  // namespace flash::ampere
