// One block of queries: where its tensors lie, which blocks of keys it visits, and its end.
//
// With split keys a thread block walks over one part of the blocks of keys (block_walk.cuh), and a second
// kernel combines the parts (split_combine.cuh, or chunk_combine.cuh).
#pragma once

#include "ampere/forward/block_walk.cuh"
#include "ampere/forward/epilogue.cuh"
#include "ampere/forward/kernel_args.cuh"
#include "ampere/forward/row_blocks.cuh"
#include "ampere/load_store.cuh"
#include "ampere/paged_load.cuh"

namespace flash::ampere {

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
    const Place place = find_place<Kernel>(args, BlockNumber<Kernel>::get());
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
        if constexpr (Kernel::chunk_tiles > 0) {
            blocks = blocks.chunk_part(part, args.n_splits, Kernel::chunk_tiles,
                                       ceil_div(k_seq.n_rows, Kernel::chunk_tiles * Kernel::B_c));
        } else {
            blocks = blocks.part<Kernel::approximate_reference>(part, args.n_splits);
        }
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
        const int kv_block = blocks.end - 1;
        state.pipeline.start(mask.seq_len_k - kv_block * Kernel::B_c);
        stamp(TracedKernel::PARTS, TraceEvent::LOADS_ISSUED);
        state.prepare_Q();
        visit_all_blocks(state, args, blocks, kv_block);
    }
    // Another ring takes the barriers' place.
    if constexpr (Kernel::chunk_tiles > 0) state.pipeline.drain(blocks.begin < blocks.end);

    stamp(TracedKernel::PARTS, TraceEvent::COMPUTED);
    if constexpr (traits.split) launch_dependents();  // the kernel that combines the parts

    // Recompute the block coordinates so that the loops need not hold them in registers. Kernels that begin
    // early keep them: they have few, and recomputing takes time.
    const Place at =
        begins_early ? place : find_place<Kernel>(args, computed_here(BlockNumber<Kernel>::get()));
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
                                   args.partial_lse + first_row * (Kernel::chunk_tiles > 0 ? 2 : 1),
                                   d_head_v);
        }
        stamp(TracedKernel::PARTS, TraceEvent::STORED);
    } else {
        const float sink = traits.sinks ? args.sinks[at.head] : 0.0f;
        epilogue.store(state.O, state.softmax, sink, gmem_O, lse);
    }
    return Kernel::cfg.softmax_reference == SoftmaxReference::ANCHORED && state.softmax.left_safe_range();
}

}  // namespace flash::ampere
