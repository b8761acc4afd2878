// dQ by a kernel of its own: a block of queries walks over the keys that they see, makes S and dP again, and
// sums dQ in registers. Two products more than adding to float32 sums takes, but no sums, and equal bits in
// every run.
//
//     S = Q K^T     P = 2^(S - LSE)     dP = dO V^T     dS = P * (dP - delta)     dQ += dS K
#pragma once

#include "ampere/backward/copies.cuh"
#include "ampere/backward/dq_barriers.cuh"
#include "ampere/backward/dq_warp.cuh"
#include "common/backward/rows_of_none.cuh"
#include "common/backward/trimmed_tiles.cuh"

namespace flash::ampere {

template <typename Kernel>
FLASH_DEVICE void compute_query_gradient(const BackwardKernelArgs &args) {
    constexpr BackwardTraits TRAITS = Kernel::traits;
    constexpr int stages = Kernel::stages;
    constexpr bool longest_first = TRAITS.causal || TRAITS.window;
    extern __shared__ char smem_begin[];
    const uint32_t smem = smem_address(smem_begin);
    const auto [batch, head, q_block] = args.query_grid.decode<longest_first>(blockIdx.x);
    SequenceRows q_seq{batch, 0, args.seq_len_q}, k_seq{batch, 0, args.seq_len_k};
    int owned_rows = args.seq_len_q;
    wait_for_prerequisites();  // the pre-pass
    if constexpr (TRAITS.varlen) {
        q_seq = sequence_rows(args.cu_seqlens_q, args.seqused_q, args.seq_len_q, args.rows_q, batch);
        k_seq = sequence_rows(args.cu_seqlens_k, args.seqused_k, args.seq_len_k, args.rows_k, batch);
        owned_rows = sequence_rows(args.cu_seqlens_q, nullptr, args.seq_len_q, args.rows_q, batch).n_rows;
        clear_gradient_rows_of_none(args.cu_seqlens_q, args.query_grid.total_heads / args.query_grid.n_heads,
                                    args.total_q, args.dQ, args.dQ_strides, args.n_heads, args.d_head);
    }
    const int tile_row = q_block * Kernel::B_r;
    if (tile_row >= owned_rows) return;

    const KeyRingBarriers<stages> barriers{smem + Kernel::smem_barriers};
    if (threadIdx.x == 0) barriers.initialize(Kernel::n_threads);
    __syncthreads();

    const int warp = uniform(threadIdx.x / kWarpSize), lane = threadIdx.x % kWarpSize;
    const VisibleRows<TRAITS> mask{.seq_len_q = q_seq.n_rows,
                                   .seq_len_k = k_seq.n_rows,
                                   .window_left = TRAITS.window ? args.window_left : 0,
                                   .window_right = TRAITS.window ? args.window_right : 0};
    const Range seeing = mask.seeing_rows(), seen = mask.seen_keys();
    // The rows of the tile that see keys, and the blocks of keys that they see.
    const Range rows{max_of(tile_row, seeing.begin), min_of(tile_row + Kernel::B_r, seeing.end)};
    Range blocks{0, 0};
    if (rows.begin < rows.end) {
        blocks = {mask.keys_of(rows.begin).begin / Kernel::B_c,
                  ceil_div(mask.keys_of(rows.end - 1).end, Kernel::B_c)};
    }
    if constexpr (trims_tiles<typename Kernel::Mod, true>()) {
        if (rows.begin < rows.end) {
            blocks = trimmed_key_tiles<typename Kernel::Mod, Kernel::B_c>(
                mod_of<typename Kernel::Mod>(args), blocks, rows, k_seq.n_rows, batch, head);
        }
    }

    const auto row_0 = [&](const void *tensor, const TensorStrides &strides, const SequenceRows &sequence,
                           int of_head) {
        const int64_t offset =
            sequence.batch * strides.batch + of_head * strides.head + sequence.first_row * strides.seq;
        return static_cast<const char *>(tensor) + offset * kElementBytes;
    };
    const int kv_head = head / args.heads_per_kv_head;
    const char *K = row_0(args.K, args.K_strides, k_seq, kv_head);
    const char *V = row_0(args.V, args.V_strides, k_seq, kv_head);
    const auto copy_K = [&](int block, int stage) {
        copy_tile<Kernel, typename Kernel::KTile>(smem + Kernel::smem_K + stage * Kernel::KTile::bytes, K,
                                                  args.K_strides.seq * kElementBytes, block * Kernel::B_c,
                                                  seen, args.d_head / kChunkElements, threadIdx.x);
        mbarrier_arrive_after_copies(barriers.full_K(stage));
    };
    const auto copy_V = [&](int block, int stage) {
        copy_tile<Kernel, typename Kernel::VTile>(smem + Kernel::smem_V + stage * Kernel::VTile::bytes, V,
                                                  args.V_strides.seq * kElementBytes, block * Kernel::B_c,
                                                  seen, args.d_head_v / kChunkElements, threadIdx.x);
        mbarrier_arrive_after_copies(barriers.full_V(stage));
    };

    const LaneRows lane_rows(lane);
    const QueryGradientWarp<Kernel> state{
        .args = args,
        .mask = mask,
        .batch = batch,
        .head = head,
        .first_row = tile_row + warp * Kernel::warp_rows,
        .lane = lane,
        .smem_Q = smem + Kernel::smem_Q + Kernel::QTile::tile_offset(warp * Kernel::m_tiles, 0),
        .smem_dO = smem + Kernel::smem_dO + Kernel::dOTile::tile_offset(warp * Kernel::m_tiles, 0),
        .smem_rows = smem + Kernel::smem_rows + 4 * (warp * Kernel::warp_rows + lane / 4),
        .lane_down = Kernel::KTile::offset(lane_rows.down.row, lane_rows.down.chunk),
        .lane_right = Kernel::KTile::offset(lane_rows.right.row, lane_rows.right.chunk),
    };
    typename QueryGradientWarp<Kernel>::dQSums dQ;
    dQ.clear();
    if (blocks.begin < blocks.end) {
        copy_tile<Kernel, typename Kernel::QTile>(
            smem + Kernel::smem_Q, row_0(args.Q, args.Q_strides, q_seq, head),
            args.Q_strides.seq * kElementBytes, tile_row, seeing, args.d_head / kChunkElements, threadIdx.x);
        copy_K(blocks.begin, 0);
        copy_tile<Kernel, typename Kernel::dOTile>(smem + Kernel::smem_dO,
                                                   row_0(args.dO, args.dO_strides, q_seq, head),
                                                   args.dO_strides.seq * kElementBytes, tile_row, seeing,
                                                   args.d_head_v / kChunkElements, threadIdx.x);
        const int64_t numbers = lse_begin(TRAITS.varlen && args.cu_seqlens_q != nullptr, q_seq, args.n_heads,
                                          head, args.seq_len_q, args.total_q);
        for (int i = threadIdx.x; i < Kernel::B_r; i += Kernel::n_threads) {
            const int row = tile_row + i;
            const bool exists = seeing.has(row);
            const uint32_t place = smem + Kernel::smem_rows + 4 * i;
            cp_async_number(place, args.lse_log2 + numbers + (exists ? row : 0), exists);
            cp_async_number(place + 4 * Kernel::B_r, args.delta + numbers + (exists ? row : 0), exists);
        }
        mbarrier_arrive_after_copies(barriers.full_Q());
        copy_V(blocks.begin, 0);
        RingPlace<stages> stage, ahead_stage;
        ahead_stage.advance();
        int ahead = blocks.begin + 1;
        const auto copy_next = [&] {
            if (ahead >= blocks.end) return;
            mbarrier_wait(barriers.empty_K(ahead_stage.slot), ahead_stage.parity ^ 1);
            copy_K(ahead, ahead_stage.slot);
            mbarrier_wait(barriers.empty_V(ahead_stage.slot), ahead_stage.parity ^ 1);
            copy_V(ahead, ahead_stage.slot);
            ++ahead;
            ahead_stage.advance();
        };
        mbarrier_wait(barriers.full_Q(), 0);
#pragma unroll 1
        for (int block = blocks.begin; block < blocks.end; ++block) {
            typename QueryGradientWarp<Kernel>::Scores S;
            typename QueryGradientWarp<Kernel>::Fragments P;
            const uint32_t smem_K = smem + Kernel::smem_K + stage.slot * Kernel::KTile::bytes;
            const uint32_t smem_V = smem + Kernel::smem_V + stage.slot * Kernel::VTile::bytes;
            mbarrier_wait(barriers.full_K(stage.slot), stage.parity);
            state.template multiply_rows<typename Kernel::QTile, typename Kernel::KTile, Kernel::d_tiles>(
                S, state.smem_Q, smem_K);
            if constexpr (stages > 1) copy_next();
            state.make_probabilities(P, S, block * Kernel::B_c);
            mbarrier_wait(barriers.full_V(stage.slot), stage.parity);
            state.template multiply_rows<typename Kernel::dOTile, typename Kernel::VTile, Kernel::d_v_tiles>(
                S, state.smem_dO, smem_V);
            barriers.arrive(barriers.empty_V(stage.slot), lane);
            state.drop(S, block * Kernel::B_c);
            state.make_dS(P, S);
            state.add(dQ, P, smem_K);
            barriers.arrive(barriers.empty_K(stage.slot), lane);
            if constexpr (stages == 1) copy_next();
            stage.advance();
        }
    }
    state.store(dQ, const_cast<char *>(row_0(args.dQ, args.dQ_strides, q_seq, head)),
                args.dQ_strides.seq * kElementBytes, blocks.begin < blocks.end ? seeing : Range{0, 0},
                owned_rows);
}

template <FlashBackwardKernelConfig CFG, BackwardTraits TRAITS>
__global__ void __launch_bounds__(StaticQueryGradientConfig<CFG, TRAITS>::n_threads,
                                  StaticQueryGradientConfig<CFG, TRAITS>::min_blocks_per_sm)
    flash_backward_dq_kernel(const __grid_constant__ BackwardKernelArgs args) {
    compute_query_gradient<StaticQueryGradientConfig<CFG, TRAITS>>(args);
}

// The same with functions of the user's.
template <FlashBackwardKernelConfig CFG, BackwardTraits TRAITS, typename MOD>
__global__ void __launch_bounds__(StaticQueryGradientConfig<CFG, TRAITS, MOD>::n_threads,
                                  StaticQueryGradientConfig<CFG, TRAITS, MOD>::min_blocks_per_sm)
    flash_backward_dq_mod_kernel(const __grid_constant__ BackwardArgs<MOD> args) {
    compute_query_gradient<StaticQueryGradientConfig<CFG, TRAITS, MOD>>(args);
}

}  // namespace flash::ampere
