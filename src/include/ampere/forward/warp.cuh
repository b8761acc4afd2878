// What a warp, or one of a pair (warp_pair.cuh), holds while its thread block works on a block of queries,
// and what it does with one block of keys: S = Q K^T, which scores its queries see, the softmax, O += P V.
#pragma once

#include "ampere/forward/pipeline.cuh"
#include "ampere/forward/score_mods.cuh"
#include "ampere/forward/softmax.cuh"
#include "ampere/gemm.cuh"
#include "ampere/warp_pair.cuh"
#include "common/mask.cuh"
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

}  // namespace flash::ampere
