// FlashAttention-2 forward: O = softmax(scale * Q K^T) V, with the log-sum-exp of every row on request.
//
// One thread block computes B_r queries of one head; each of its warps owns B_r / n_warps of them. It
// walks over the blocks of B_c keys from the last visible one to the first (mask.cuh), in up to three
// loops, so that only blocks that need a mask are masked:
//
//     K/V block   begin   …        full_begin  …  full_end - 1      full_end   …   end - 1
//                 |←─ mask (window) ─|←────── no mask ───────────|←── mask ──────────────| start here
//
// With split keys it walks over one part of these blocks, and a second kernel combines the parts
// (split_combine.cuh).
//
// S, P and O stay in registers; Q, K and V pass through shared memory, one block each. Schedule of one
// K/V block, with `eager_load_blocks` (| is a barrier; copies run until the next wait at the barrier):
//
//     V(j) ──────────┐   K(j-1) ──────────────────┐
//   | S = Q K(j)^T   | softmax   O += P V(j)      |  …        without it: K(j), wait, S, V(j), wait, …
#pragma once

#include "ampere/epilogue.cuh"
#include "ampere/forward_kernel_args.cuh"
#include "ampere/gemm.cuh"
#include "ampere/load_store.cuh"
#include "ampere/softmax.cuh"
#include "ampere/static_kernel_configuration.cuh"
#include "mask.cuh"
#include "sequence_rows.cuh"

namespace flash::ampere {

// What a warp holds while its thread block works on one Q block.
template <typename Kernel>
struct ForwardWarp {
    using Tile = typename Kernel::KVTile;

    const Mask<Kernel::traits> mask;
    const int first_row;    // the warp's first query
    const int first_block;  // K/V blocks are visited from last_block down to first_block
    const int last_block;
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
        if (has_rows()) score_product(S, Q);

        if constexpr (!eager) V_loader.template load<kMasked>(valid_keys);
        wait_for_copies<Kernel>();
        __syncthreads();  // V is complete; all warps are done with K
        if constexpr (eager) {
            if (kv_block > first_block) K_loader.template load<false>(Kernel::B_c);
        }

        if (!has_rows()) return;
        softmax.scale_scores(S);
        if constexpr (kMasked) hide_invisible(S, first_key);
        softmax.update_max(S, O, kv_block == last_block);
        output_product(O, [&](int key_tile) { return softmax.probabilities(S, key_tile); });
    }

    // Whether any of the warp's queries exists. With split keys a Q block may be a single query: warps that
    // have none only copy. Elsewhere it is not worth the branch.
    FLASH_DEVICE bool has_rows() const { return !Kernel::traits.split || first_row < mask.seq_len_q; }

  private:
    // Scores of keys that a query does not see become -inf.
    FLASH_DEVICE void hide_invisible(Scores<Kernel> &S, int first_key) const {
        const int lane = threadIdx.x % kWarpSize;
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const MatrixCoordinate at = accumulator(lane, i);
                const int row = first_row + m * kMmaM + at.row;
                const int end = mask.visible_end(row) - first_key - at.column;
                const int begin = mask.visible_begin(row) - first_key - at.column;
#pragma unroll
                for (int n = 0; n < Kernel::B_c / kMmaN; ++n) {
                    if (n * kMmaN >= end) S.rmem[m][n][i] = -INFINITY;
                    if (Kernel::traits.window && n * kMmaN < begin) S.rmem[m][n][i] = -INFINITY;
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

    // Consecutive thread blocks work on one part of the keys.
    int block_index = blockIdx.x;
    int part = 0;
    if constexpr (TRAITS.split) {
        const int part_blocks = args.grid.n_q_blocks * args.grid.total_heads;
        part = block_index / part_blocks;
        block_index -= part * part_blocks;
    }
    constexpr bool longest_first = TRAITS.causal || TRAITS.window;  // a head's later Q blocks have more work
    const auto [batch, head, q_block] = args.grid.decode<longest_first>(block_index);
    const int kv_head = head / args.heads_per_kv_head;

    SequenceRows q_seq{batch, 0, args.seq_len_q}, k_seq{batch, 0, args.seq_len_k};
    if constexpr (TRAITS.varlen) {
        q_seq = sequence_rows(args.cu_seqlens_q, nullptr, args.seq_len_q, batch);
        k_seq = sequence_rows(args.cu_seqlens_k, args.seqused_k, args.seq_len_k, batch);
    }
    const int d_head = TRAITS.padded_head ? args.d_head : Kernel::d_head;
    const int d_head_v = TRAITS.padded_head ? args.d_head_v : Kernel::d_head;
    GlobalMatrix gmem_Q(args.Q, args.Q_strides, q_seq.batch, head, d_head);       // (seq_len_q, d_head)
    GlobalMatrix gmem_K(args.K, args.K_strides, k_seq.batch, kv_head, d_head);    // (seq_len_k, d_head)
    GlobalMatrix gmem_V(args.V, args.V_strides, k_seq.batch, kv_head, d_head_v);  // (seq_len_k, d_head_v)
    if constexpr (TRAITS.varlen) {
        gmem_Q.skip_rows(q_seq.first_row);
        gmem_K.skip_rows(k_seq.first_row);
        gmem_V.skip_rows(k_seq.first_row);
    }

    Mask<TRAITS> mask{q_seq.n_rows, k_seq.n_rows};
    if constexpr (TRAITS.window) {
        mask.window_left = args.window_left;
        mask.window_right = args.window_right;
    }
    const int q_row = q_block * Kernel::B_r;  // first query of the thread block
    const int q_rows = min_of(Kernel::B_r, q_seq.n_rows - q_row);
    if (TRAITS.varlen && q_rows <= 0) return;  // the grid is as large as the longest sequence needs
    KeyBlocks blocks = mask.key_blocks(q_row, q_row + q_rows - 1, Kernel::B_c);
    if constexpr (TRAITS.split) blocks = blocks.part(part, args.n_splits);
    const int last_key_row = (blocks.end - 1) * Kernel::B_c;
    const int warp_row = warp * Kernel::warp_rows;

    ForwardWarp<Kernel> state{
        .mask = mask,
        .first_row = q_row + warp_row,
        .first_block = blocks.begin,
        .last_block = blocks.end - 1,
        .K_loader = {gmem_K, last_key_row, smem + Kernel::smem_K},
        .V_loader = {gmem_V, last_key_row, smem + Kernel::smem_V},
        .Q = {smem + Kernel::smem_Q, warp, lane},
        .score_product = {smem + Kernel::smem_K, lane},
        .output_product = {smem + Kernel::smem_V, lane},
        .softmax = OnlineSoftmax<Kernel>(args.scale),
    };
    state.O.clear();

    if (blocks.begin < blocks.end) {
        int kv_block = blocks.end - 1;
        TileLoader<Kernel, typename Kernel::QTile> Q_loader(gmem_Q, q_row, smem + Kernel::smem_Q);
        Q_loader.template load<true>(q_rows);
        if constexpr (CFG.eager_load_blocks) {
            state.K_loader.template load<true>(mask.seq_len_k - kv_block * Kernel::B_c);
        }
        wait_for_copies<Kernel>();
        __syncthreads();  // Q is complete
        state.prepare_Q();
#pragma unroll 1
        for (; kv_block >= blocks.full_end; --kv_block) state.template process_kv_block<true>(kv_block);
#pragma unroll 1
        for (; kv_block >= blocks.full_begin; --kv_block) state.template process_kv_block<false>(kv_block);
        if constexpr (TRAITS.window) {
#pragma unroll 1
            for (; kv_block >= blocks.begin; --kv_block) state.template process_kv_block<true>(kv_block);
        }
    }

    const Epilogue<Kernel> epilogue{
        .smem_O = smem + Kernel::smem_Q,
        .warp_row = warp_row,
        .first_row = state.first_row,
        .mask = mask,
    };
    if constexpr (TRAITS.split) {
        if (!state.has_rows()) return;
        const int64_t total_rows = int64_t(args.grid.total_heads) * args.seq_len_q;
        const int64_t first_row =
            part * total_rows + (int64_t(batch) * args.grid.n_heads + head) * args.seq_len_q;
        epilogue.store_partial(state.O, state.softmax, args.partial_O + first_row * d_head_v,
                               args.partial_lse + first_row, d_head_v);
    } else {
        float *lse = args.lse;  // (seq_len_q)
        if (lse != nullptr) {
            lse += lse_begin(TRAITS.varlen && args.cu_seqlens_q != nullptr, q_seq, args.grid.n_heads, head,
                             args.seq_len_q, args.total_q);
        }
        const float sink = TRAITS.sinks ? args.sinks[head] : 0.0f;
        GlobalMatrix gmem_O(args.O, args.O_strides, q_seq.batch, head, d_head_v);  // (seq_len_q, d_head_v)
        if constexpr (TRAITS.varlen) gmem_O.skip_rows(q_seq.first_row);
        epilogue.store(state.O, state.softmax, sink, gmem_O, lse);
    }
}

}  // namespace flash::ampere
