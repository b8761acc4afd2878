// FlashAttention-2 forward: O = softmax(scale * Q K^T) V, with the log-sum-exp of every row on request.
//
// One thread block computes B_r queries of one head; each of its warps, or pairs of warps (warp_pair.cuh),
// owns an equal share of them. It
// walks over the blocks of B_c keys from the last visible one to the first (mask.cuh), in up to three loops,
// so that only blocks that need a mask are masked:
//
//     K/V block   begin  …           full_begin  …       full_end  …      end - 1
//                 |← general (window) |←──── no mask ───|←── general ───────────| start here
//
// General blocks have a mask where one is needed, and take the softmax's reference from their maximum; a
// reference that is not the maximum (softmax.cuh) is therefore good for every row when the steady blocks
// begin. S, P and O stay in registers; Q, K and V pass through shared memory (pipeline.cuh).
//
// With split keys a thread block walks over one part of these blocks, and a second kernel combines the
// parts (split_combine.cuh).
#pragma once

#include "ampere/forward/epilogue.cuh"
#include "ampere/forward/kernel_args.cuh"
#include "ampere/forward/pipeline.cuh"
#include "ampere/forward/score_mods.cuh"
#include "ampere/forward/softmax.cuh"
#include "ampere/forward/static_kernel_configuration.cuh"
#include "ampere/gemm.cuh"
#include "ampere/load_store.cuh"
#include "ampere/paged_load.cuh"
#include "ampere/warp_pair.cuh"
#include "common/mask.cuh"
#include "common/rows_of_none.cuh"
#include "common/trace.cuh"

namespace flash::ampere {

// Which queries the rows of a thread block are. Planned work has the heads of a group as rows of one query.
template <typename Kernel>
struct BlockRows {
    FLASH_DEVICE static int query(int row) { return row; }
};
template <typename Kernel>
    requires(Kernel::traits.planned)
struct BlockRows<Kernel> {
    RowDivisor by_group;
    int n_rows;  // that exist
    FLASH_DEVICE int query(int row) const { return by_group.divide(row); }
};

// What a warp holds while its thread block works on one Q block.
template <typename Kernel>
struct ForwardWarp {
    const Mask<Kernel::traits> mask;
    const int q_row;       // the thread block's first query
    const int last_block;  // the K/V block that is visited first
    Pipeline<Kernel> pipeline;
    QueryOperand<Kernel> Q;                      // (warp_rows, d_head)
    const ScoreProduct<Kernel> score_product;    // S = Q K^T
    const OutputProduct<Kernel> output_product;  // O += P V
    OnlineSoftmax<Kernel> softmax;
    Output<Kernel> O;             // (warp_rows, d_head), not yet divided by l
    const WarpPair<Kernel> pair;  // used with paired_warps only
    [[no_unique_address]] const ScoreMods<Kernel> mods;
    [[no_unique_address]] TileWalk<Kernel> walk;  // over the K/V blocks that a mod leaves something of
    [[no_unique_address]] const BlockRows<Kernel> rows{};

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
        const bool sees_block = has_rows() && (!kGeneral || may_see(first_key));
        BlockScores<Kernel> block_S;  // (warp_rows, B_c)

        pipeline.template before_scores<kGeneral>(valid_keys);
        if (kv_block == last_block) stamp(TracedKernel::PARTS, TraceEvent::FIRST_TILE);
        if (sees_block) {
            score_product(block_S, Q, pipeline.offset(), mask.seq_len_q);
            if constexpr (Kernel::paired_warps) pair.send_scores(block_S);
        }
        pipeline.template after_scores<kGeneral>(valid_keys);
        stamp(TracedKernel::PARTS, TraceEvent::LAST_TILE);  // the last one's stays
        if (sees_block) {
            if constexpr (Kernel::paired_warps) {
                Scores<Kernel> S = pair.receive_scores(block_S);  // (warp_rows, B_c / 2)
                take_scores<kGeneral>(S, first_key + pair.half * Kernel::warp_keys, kv_block == last_block);
                multiply_as_pair(S, first_key + pair.half * Kernel::warp_keys);
            } else {
                take_scores<kGeneral>(block_S, first_key, kv_block == last_block);
                const auto kept = mods.kept_weights(q_row + warp_row(), first_key);
                output_product(
                    O, [&](int key_tile) { return softmax.probabilities(block_S, key_tile, kept); },
                    pipeline.offset(), mask.seq_len_q);
            }
        }
        pipeline.after_output();
    }

    // After the last block: both warps of a pair have the sums of all keys.
    FLASH_DEVICE void complete_sums() {
        if constexpr (Kernel::paired_warps && !Kernel::cfg.tensor_row_sums) {
            pair.share(softmax.row_sum, [](float own, float other) { return own + other; });
        }
    }

    // Whether any of the warp's queries exists. With split keys a Q block may be a single query: warps that
    // have none only copy. Elsewhere that is not worth a branch.
    FLASH_DEVICE bool has_rows() const {
        if constexpr (Kernel::traits.planned) return warp_row() < rows.n_rows;
        return !Kernel::traits.split || q_row + warp_row() < mask.seq_len_q;
    }

  private:
    // From scores to a reference that they can be taken by; `first`: no block was before this one.
    template <bool kGeneral>
    FLASH_DEVICE void take_scores(Scores<Kernel> &S, int first_key, bool first) {
        softmax.scale_scores(S);
        if constexpr (Kernel::has_mod)
            mods.apply(S, q_row + warp_row(), first_key, mask.seq_len_q, walk.kind);
        if constexpr (kGeneral) hide_invisible(S, first_key);
        softmax.template update<kGeneral>(S, O, first, [&](auto &maxima) {
            if constexpr (Kernel::paired_warps) {
                pair.share(maxima, [](float own, float other) { return fmaxf(own, other); });
            }
        });
    }

    // O += P V for the P of this warp's keys, then, when it has come, for that of the other's.
    FLASH_DEVICE void multiply_as_pair(const Scores<Kernel> &S, int first_key) {
        const auto kept = mods.kept_weights(q_row + warp_row(), first_key);
        PairProbabilities<Kernel> P;
#pragma unroll
        for (int k = 0; k < Kernel::warp_key_tiles; ++k) P.rmem[k] = softmax.probabilities(S, k, kept);
        pair.send_probabilities(P);
        const auto part = [&](int key_tile) { return P.rmem[key_tile]; };
        output_product(O, part, pipeline.offset() + pair.key_offset(pair.half), mask.seq_len_q);
        pair.receive_probabilities(P);
        if constexpr (Kernel::cfg.tensor_row_sums) {
#pragma unroll
            for (const auto &fragment : P.rmem) softmax.add_rows(fragment);
        }
        output_product(O, part, pipeline.offset() + pair.key_offset(1 - pair.half), mask.seq_len_q);
    }

    // Found out where it is needed: no register is held for it.
    static FLASH_DEVICE int warp_row() {
        return computed_here(threadIdx.x) / (kWarpSize * Kernel::warps_per_group) * Kernel::warp_rows;
    }

    // The mask, and the warp's first query, with keys counted from `first_key`. Whatever is computed from
    // them depends on the block: nothing of it can be kept in registers from block to block.
    struct BlockView {
        Mask<Kernel::traits> mask;
        int row;
    };
    FLASH_DEVICE BlockView view_from(int first_key) const {
        BlockView view{mask, q_row - first_key + rows.query(warp_row())};
        view.mask.seq_len_q -= first_key;
        view.mask.seq_len_k -= first_key;
        return view;
    }

    // By how many queries the warp's last row is behind its first.
    FLASH_DEVICE int last_row_behind() const {
        if constexpr (Kernel::traits.planned) {
            const int first = warp_row();
            return rows.query(first + Kernel::warp_rows - 1) - rows.query(first);
        }
        return Kernel::warp_rows - 1;
    }

    // Under a causal mask or a window the rows of some warps end before a block that others see, or begin
    // behind it.
    FLASH_DEVICE bool may_see(int first_key) const {
        if constexpr (!Kernel::traits.causal && !Kernel::traits.window) return true;
        const auto [mask, row] = view_from(first_key);
        const bool ends_behind = mask.visible_end(row + last_row_behind()) > 0;
        const bool begins_before = mask.visible_begin(row) < Kernel::B_c;
        return __any_sync(kAllLanes, ends_behind && begins_before);  // tells the compiler: all lanes agree
    }

    // Scores of keys that a query does not see become -inf.
    FLASH_DEVICE void hide_invisible(Scores<Kernel> &S, int first_key) const {
        const auto [mask, first_row] = view_from(first_key);
        bool all_visible = mask.visible_end(first_row) >= Kernel::warp_keys;
        if constexpr (Kernel::traits.window) {
            all_visible = all_visible && mask.visible_begin(first_row + last_row_behind()) <= 0;
        }
        if (__all_sync(kAllLanes, all_visible)) return;  // no row of the warp ends or begins here
        const int lane = computed_here(threadIdx.x % kWarpSize);
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const MatrixCoordinate at = accumulator(lane, i);
                int row = first_row + m * kMmaM + at.row;
                if constexpr (Kernel::traits.planned) {
                    row = q_row - first_key + rows.query(warp_row() + m * kMmaM + at.row);
                }
                const int end = mask.visible_end(row) - at.column;
                const int begin = mask.visible_begin(row) - at.column;
#pragma unroll
                for (int n = 0; n < Kernel::warp_keys / kMmaN; ++n) {
                    if (n * kMmaN >= end) S.rmem[m][n][i] = -INFINITY;
                    if (Kernel::traits.window && n * kMmaN < begin) S.rmem[m][n][i] = -INFINITY;
                }
            }
        }
    }
};

template <typename Kernel>
FLASH_DEVICE ScoreMods<Kernel> score_mods(const KernelArgs<typename Kernel::Mod> &args, int batch, int head) {
    if constexpr (Kernel::has_mod) {
        return {args.mod.captured, batch, head};
    } else {
        return {};
    }
}

// The K/V blocks that a mod's mask leaves something of for a thread block's queries; `blocks` then end with
// the first one that is visited.
template <typename Kernel>
FLASH_DEVICE TileWalk<Kernel> walk_tiles(const KernelArgs<typename Kernel::Mod> &args, const Place &place,
                                         KeyBlocks &blocks) {
    if constexpr (!Kernel::mod_hides_keys) {
        return {};
    } else {
        const int first_row = uniform(place.q_block) * Kernel::B_r;
        const int last_row = min_of(first_row + Kernel::B_r, place.q_seq.n_rows) - 1;
        TileWalk<Kernel> walk{{args.mod.captured, args.mod.tiles, place.batch, place.head, place.q_block,
                               first_row, last_row, place.k_seq.n_rows},
                              blocks.begin};
        if (blocks.begin < blocks.end) {
            const Visited first = walk.tiles.first_of(blocks.end, blocks.begin);
            blocks.end = first.kv_block + 1;
            blocks.full_end = min_of(blocks.full_end, blocks.end);
            walk.kind = first.kinds.of(0);
        }
        return walk;
    }
}

// Computes the Q block of this thread block. Returns whether scores have outgrown an anchored reference, as
// far as this thread sees; what was stored then is not right.
template <typename Kernel>
FLASH_DEVICE bool compute_q_block(const KernelArgs<typename Kernel::Mod> &args) {
    extern __shared__ __align__(128) char smem_begin[];
    const uint32_t smem = smem_address(smem_begin);
    const int warp = uniform(threadIdx.x / kWarpSize);
    const int lane = threadIdx.x % kWarpSize;
    stamp(TracedKernel::PARTS, TraceEvent::BEGIN);

    constexpr ForwardTraits traits = Kernel::traits;
    // Addresses are worked out while the kernel before this one ends, if they follow from no memory.
    constexpr bool begins_early = traits.split && !traits.varlen && !traits.paged;
    if constexpr (traits.split && !begins_early) wait_for_prerequisites();
    const Place place = find_place<Kernel>(args, blockIdx.x);
    const auto &[part, batch, head, q_block, q_seq, k_seq] = place;
    const int kv_head = uniform(head / args.heads_per_kv_head);
    const int d_head = traits.padded_head ? args.d_head : Kernel::d_head;
    const int d_head_v = traits.padded_head ? args.d_head_v : Kernel::d_head;
    GlobalMatrix gmem_Q(args.Q, args.Q_strides, q_seq.batch, head, d_head);  // (seq_len_q, d_head)
    const int kv_batch = traits.paged ? 0 : k_seq.batch;  // the first page, or the sequence
    GlobalMatrix gmem_K(args.K, args.K_strides, kv_batch, kv_head, d_head);    // (seq_len_k, d_head)
    GlobalMatrix gmem_V(args.V, args.V_strides, kv_batch, kv_head, d_head_v);  // (seq_len_k, d_head_v)
    if constexpr (traits.varlen) {
        gmem_Q.skip_rows(q_seq.first_row);
        gmem_K.skip_rows(k_seq.first_row);
        gmem_V.skip_rows(k_seq.first_row);
    }

    Mask<traits> mask{q_seq.n_rows, k_seq.n_rows};
    if constexpr (traits.window) {
        mask.window_left = args.window_left;
        mask.window_right = args.window_right;
    }
    const int q_row = uniform(q_block) * Kernel::B_r;  // first query of the thread block
    const int q_rows = min_of(Kernel::B_r, q_seq.n_rows - q_row);
    if (traits.varlen && q_rows <= 0) return false;  // the grid has room for the longest sequence
    KeyBlocks blocks =
        mask.template key_blocks<Kernel::approximate_reference>(q_row, q_row + q_rows - 1, Kernel::B_c);
    if constexpr (traits.split) {
        blocks = blocks.part<Kernel::approximate_reference>(part, args.n_splits);
    }
    const TileWalk<Kernel> walk = walk_tiles<Kernel>(args, place, blocks);
    blocks.end = uniform(blocks.end);
    blocks.full_end = uniform(blocks.full_end);
    if constexpr (traits.window) blocks.full_begin = uniform(blocks.full_begin);
    const int last_key_row = (blocks.end - 1) * Kernel::B_c;
    const int group = warp / Kernel::warps_per_group;
    const int half = warp % Kernel::warps_per_group;  // of d_head; 0 unless warps are paired
    const int warp_row = group * Kernel::warp_rows;
    const int panel = half * (Kernel::QTile::panels / 2);  // the first of the warp's columns

    const auto load_Q = [&] {
        if (blocks.begin < blocks.end) {
            TileLoader<Kernel, typename Kernel::QTile> Q_loader(gmem_Q, q_row, smem + Kernel::smem_Q);
            Q_loader.template load<true>(q_rows);
        }
    };
    if constexpr (!begins_early) load_Q();
    const KVSource<Kernel> source{
        .K =
            kv_loader<Kernel>(gmem_K, args, args.K_strides, k_seq.batch, last_key_row, smem + Kernel::smem_K),
        .V =
            kv_loader<Kernel>(gmem_V, args, args.V_strides, k_seq.batch, last_key_row, smem + Kernel::smem_V),
        .blocks_left = blocks.end - blocks.begin,
        .hidden_keys = uniform(mask.visible_begin(q_row) - blocks.begin * Kernel::B_c),
        .walk = walk,
    };
    ForwardWarp<Kernel> state{
        .mask = mask,
        .q_row = q_row,
        .last_block = blocks.end - 1,
        .pipeline = {source, smem + Kernel::smem_barriers},
        .Q = {smem + Kernel::smem_Q + panel * Kernel::QTile::panel_bytes, group, lane},
        .score_product = {smem + Kernel::smem_K + panel * Kernel::KVTile::panel_bytes, lane, half},
        .output_product = {smem + Kernel::smem_V + panel * Kernel::KVTile::panel_bytes, lane},
        .softmax = OnlineSoftmax<Kernel>(args.scale),
        .O = {},
        .pair = {smem + Kernel::smem_boxes + group * (2 * Kernel::box_bytes), half},
        .mods = score_mods<Kernel>(args, batch, head),
        .walk = walk,
    };
    state.O.clear();
    if constexpr (begins_early) {
        wait_for_prerequisites();
        stamp(TracedKernel::PARTS, TraceEvent::MAY_READ);
        load_Q();
    }

    if (blocks.begin < blocks.end) {
        int kv_block = blocks.end - 1;
        state.pipeline.start(mask.seq_len_k - kv_block * Kernel::B_c);
        stamp(TracedKernel::PARTS, TraceEvent::LOADS_ISSUED);
        state.prepare_Q();
#pragma unroll 1
        for (; kv_block >= blocks.full_end; kv_block = state.walk.behind(kv_block)) {
            state.template process_kv_block<true>(kv_block);
        }
#pragma unroll 1
        for (; kv_block >= blocks.full_begin; kv_block = state.walk.behind(kv_block)) {
            state.template process_kv_block<false>(kv_block);
        }
        if constexpr (traits.window) {
#pragma unroll 1
            for (; kv_block >= blocks.begin; kv_block = state.walk.behind(kv_block)) {
                state.template process_kv_block<true>(kv_block);
            }
        }
        state.complete_sums();
    }

    stamp(TracedKernel::PARTS, TraceEvent::COMPUTED);
    if constexpr (traits.split) launch_dependents();  // the kernel that combines the parts

    // Recompute the block coordinates so that the loops need not hold them in registers. Kernels that begin
    // early keep them: they have few, and recomputing takes time.
    const Place at = begins_early ? place : find_place<Kernel>(args, computed_here(blockIdx.x));
    float *lse = args.lse;         // (seq_len_q)
    if (half != 0) lse = nullptr;  // the other warp of the pair writes it
    if (lse != nullptr) {
        lse += lse_begin(traits.varlen && args.cu_seqlens_q != nullptr, at.q_seq, args.grid.n_heads, at.head,
                         args.seq_len_q, args.total_q);
    }
    GlobalMatrix gmem_O(args.O, args.O_strides, at.q_seq.batch, at.head, d_head_v);  // (seq_len_q, d_head_v)
    if constexpr (traits.varlen) gmem_O.skip_rows(at.q_seq.first_row);
    const Epilogue<Kernel> epilogue{
        .smem_O = smem + Kernel::smem_Q,
        .warp_row = warp_row,
        .first_panel = panel,
        .first_row = at.q_block * Kernel::B_r + warp_row,
        .mask = mask,
        .weight_scale = weight_scale<typename Kernel::Mod>(static_cast<const ForwardKernelArgs &>(args)),
    };
    if constexpr (traits.split) {
        const int64_t total_heads = args.grid.total_heads;
        const int64_t first_row =  // of the workspaces
            (at.part * total_heads + at.batch * args.grid.n_heads + at.head) * args.seq_len_q;
        if (state.has_rows()) {
            epilogue.store_partial(state.O, state.softmax, args.partial_o + first_row * d_head_v,
                                   args.partial_lse + first_row, d_head_v);
        }
        stamp(TracedKernel::PARTS, TraceEvent::STORED);
    } else {
        const float sink = traits.sinks ? args.sinks[at.head] : 0.0f;
        epilogue.store(state.O, state.softmax, sink, gmem_O, lse);
    }
    return Kernel::cfg.softmax_reference == SoftmaxReference::ANCHORED && state.softmax.left_safe_range();
}

// A function of its own, so that this rarely needed code costs the other no registers.
template <FlashForwardKernelConfig CFG, ForwardTraits TRAITS>
__device__ __noinline__ void recompute_q_block(const ForwardKernelArgs &args) {
    using Exact = StaticForwardKernelConfig<with_exact_softmax(CFG), TRAITS>;
    static_assert(Exact::smem_bytes <= StaticForwardKernelConfig<CFG, TRAITS>::smem_bytes,
                  "what runs again has the shared memory of the launch");
    compute_q_block<Exact>(args);
}

// Planned work (planned_blocks.cuh).
template <typename Kernel>
FLASH_DEVICE void run_planned_items(const ForwardKernelArgs &args);

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
        const bool left_safe_range = compute_q_block<StaticForwardKernelConfig<CFG, TRAITS>>(args);
        if constexpr (CFG.softmax_reference == SoftmaxReference::ANCHORED) {
            // Nobody reads shared memory any more, and what was stored is overwritten after it was written.
            if (__syncthreads_or(left_safe_range)) recompute_q_block<CFG, TRAITS>(args);
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
