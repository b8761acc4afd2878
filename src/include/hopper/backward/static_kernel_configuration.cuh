// What follows from a Hopper backward configuration at compile time: threads, registers, and the map of
// shared memory. A configuration that cannot work is refused here by name.
//
// Shared memory of a block:
//
//     K slots     k_stages x (B_c, d)      a key tile stays for its whole item
//     V slots     v_stages x (B_c, d_v)
//     Q ring      q_stages x (B_r, d)
//     dO ring     q_stages x (B_r, d_v)
//     dS slots    2 x (B_c, B_r)           none where dQ has a kernel of its own
//     dQ staging  (B_r, d) float32         where bulk reductions take it
//     P slots     2 x (B_c, B_r)           with split_gradients: from one warpgroup to the other
//     rows        q_stages x B_r x (LSE, delta) float32
//     diagonals   of each warpgroup with scores: a function's values of the distance between key and query
//     control     1 KiB: mbarriers, the work item of each K slot, the kinds of tiles of each Q slot
#pragma once

#include "backward.cuh"
#include "common/known_ahead.cuh"
#include "common/mod.cuh"
#include "common/shared_diagonals.cuh"
#include "hopper/layout.cuh"

namespace flash::hopper {

inline constexpr int kBackwardControlBytes = 1024;
inline constexpr int kBackwardMaxSmemBytes = 227 * 1024;

template <HopperBackwardKernelConfig CFG, BackwardTraits TRAITS, typename MOD = NoMod>
struct StaticBackwardKernelConfig {
    using Mod = MOD;  // functions of the user's
    static constexpr bool has_mod = is_mod<MOD>;
    static constexpr bool drops = drops_weights<MOD>, signs_dropped = flash::signs_dropped<MOD>();
    static constexpr bool mod_changes_scores = changes_scores<MOD>();
    // A mask is all that functions of the user's change: probabilities are those of a kernel without, and
    // what is left of a tile is told beside it.
    static constexpr bool hides_scores = hides_keys<MOD>() && !mod_changes_scores && !drops;
    // dS is made of P alone: scores are replaced by what functions make of them, before the products that
    // follow, and what runs beside these is the code of a kernel without.
    static constexpr bool replaces_scores = mod_changes_scores && !scales_gradients<MOD>();
    static constexpr bool knows_ahead = replaces_scores && knows_columns_ahead<MOD>;
    static_assert(!has_mod || !TRAITS.softcap, "with a mod, a soft cap is a part of it");
    static constexpr HopperBackwardKernelConfig cfg = CFG;
    static constexpr BackwardTraits traits = TRAITS;
    static constexpr DType dtype = CFG.dtype;
    static constexpr int d_head = CFG.d_head;      // columns of Q, K, dQ and dK
    static constexpr int d_head_v = CFG.d_head_v;  // columns of V, dO and dV
    static constexpr int B_r = CFG.B_r;
    static constexpr int B_c = CFG.B_c;
    static constexpr int q_stages = CFG.q_stages, k_stages = CFG.k_stages, v_stages = CFG.v_stages;

    static constexpr bool sums_dq = CFG.dq_output != DqOutput::OWN_KERNEL;
    // A block takes all keys of a head, and its sums of dQ are its own.
    static constexpr bool keeps_dq = CFG.dq_output == DqOutput::BLOCK_SUMS;
    static constexpr bool stages_dq = CFG.dq_output == DqOutput::BULK_REDUCTION || keeps_dq;
    static constexpr bool late_dq = CFG.late_dq && sums_dq;
    // dS is made of P in float32, with softcap of its product with the derivative of the cap, where that fits
    // the registers; else of P in FP16, while P of dV is of the inputs' type. For BF16 P is 2^p_shift times
    // what it is, so that small ones are not lost in FP16; gradients are divided by that when they leave.
    static constexpr bool float_p = CFG.float_p || TRAITS.softcap;
    static constexpr int p_shift = !CFG.float_p && CFG.dtype == DType::BF16 ? 12 : 0;
    static constexpr float p_unit = 1.f / (1 << p_shift);

    static constexpr bool trimmed = CFG.trimmed;

    static constexpr int warpgroup_threads = 128;
    // One warpgroup computes S and dV, the other dP and dK, of the same 64 keys. Else each owns 64 keys.
    static constexpr bool split = CFG.split_gradients;
    // Functions of the user's may have derivatives beyond FP16's range, and P of dS is not that of dV then;
    // nor is it with dropout.
    static constexpr DType handed = scales_gradients<MOD>() ? CFG.dtype : DType::FP16;
    static constexpr bool half_p =  // P twice, in both types
        !float_p && !split && (CFG.dtype == DType::BF16 || scales_gradients<MOD>() || drops);
    static constexpr int n_consumers = 2;
    static constexpr int n_consumer_warps = n_consumers * 4;
    static constexpr int n_threads = (n_consumers + 1) * warpgroup_threads;
    // Registers a thread of the producer and of a consumer warpgroup; 65536 in all.
    static constexpr bool few_for_producer = CFG.float_p || !sums_dq;
    static constexpr int producer_registers = few_for_producer ? 24 : 40;
    static constexpr int consumer_registers = few_for_producer ? 240 : 232;

    // For Scheduler: a whole warp takes items, for it writes the gradients of tiles that nobody sees.
    static constexpr bool warp_loads = true, paired_blocks = false;
    static constexpr int mail_slots = 0;

    // dQ of a tile is cut into a part for each consumer warpgroup: 64 of the rows, or 64 of the columns.
    static constexpr bool dq_parts_are_rows = B_r == n_consumers * kWarpgroupRows;
    static constexpr int dq_columns = dq_parts_are_rows ? d_head : d_head / n_consumers;
    // A part of columns is multiplied by the same columns of K, which begin with a panel: of 96, panels hold
    // columns 0 to 63 and 48 to 111.
    static constexpr int k_panel_step = sums_dq && !dq_parts_are_rows ? dq_columns : kPanelColumns;
    static constexpr int dq_part_floats = kWarpgroupRows * dq_columns;
    // What dq_sums is counted in: tiles of 16 rows; sums that a block keeps in query blocks.
    static constexpr int dq_tile_rows = keeps_dq ? B_r : kMmaM;
    static constexpr int dq_row_tiles = B_r / dq_tile_rows;  // of a query block

    static constexpr int k_bytes = tile_bytes(B_c, d_head), v_bytes = tile_bytes(B_c, d_head_v);
    static constexpr int q_bytes = tile_bytes(B_r, d_head), do_bytes = tile_bytes(B_r, d_head_v);
    static constexpr int ds_bytes = tile_bytes(B_c, B_r);
    static constexpr int ds_stages = sums_dq ? 2 : 0;
    // Split: P on its way from one warpgroup to the other.
    static constexpr int p_stages = split ? 2 : 0;
    static constexpr int p_bytes = B_c * B_r * (CFG.float_p ? 4 : 2);
    static constexpr int row_bytes = B_r * 4;

    static constexpr int smem_k = 0;
    static constexpr int smem_v = smem_k + k_stages * k_bytes;
    static constexpr int smem_q = smem_v + v_stages * v_bytes;
    static constexpr int smem_do = smem_q + q_stages * q_bytes;
    static constexpr int smem_ds = smem_do + q_stages * do_bytes;
    static constexpr int smem_dq = smem_ds + ds_stages * ds_bytes;
    static constexpr int smem_p = smem_dq + (stages_dq ? B_r * d_head * 4 : 0);
    static constexpr int smem_lse = smem_p + p_stages * p_bytes;
    static constexpr int smem_delta = smem_lse + q_stages * row_bytes;
    static constexpr int smem_diagonals = smem_delta + q_stages * row_bytes;
    // Of each warpgroup that has scores, where a function's values of the distance between key and query are
    // costly, and where there is room.
    using Diagonals = SharedDiagonals<kWarpgroupRows, B_r>;
    static constexpr int wanted_diagonal_bytes =
        knows_ahead && has_costly_diagonal<MOD> ? (split ? 1 : n_consumers) * Diagonals::kBytes : 0;
    static constexpr bool shares_diagonals =
        wanted_diagonal_bytes > 0 &&
        smem_diagonals + wanted_diagonal_bytes + kBackwardControlBytes <= kBackwardMaxSmemBytes;
    static constexpr int smem_control = smem_diagonals + (shares_diagonals ? wanted_diagonal_bytes : 0);
    static constexpr int smem_bytes = smem_control + kBackwardControlBytes;

    static_assert(B_c == (split ? 1 : 2) * kWarpgroupRows,
                  "B_c: 64 keys for each of two consumer warpgroups; with split_gradients for both");
    static_assert(B_r == 64 || B_r == 128, "B_r: 64 or 128");
    static_assert(is_head_size(d_head) && is_head_size(d_head_v),
                  "d_head, d_head_v: 64, 96, 128, 192 or 256; others are padded by the caller");
    static_assert(!sums_dq || dq_columns == 48 || dq_columns == 64,
                  "dQ: each of two consumer warpgroups takes 64 rows and 48 or 64 columns: (B_r, d_head) of "
                  "(128, 64), (64, 96) or (64, 128); or choose dq_output OWN_KERNEL");
    static_assert(!keeps_dq || dq_columns == kPanelColumns,
                  "dq_output BLOCK_SUMS: dQ leaves by 32 columns, which 48 are no multiple of");
    static_assert(!TRAITS.float_query_gradients || !keeps_dq,
                  "float_query_gradients: with dq_output BLOCK_SUMS this kernel rounds dQ");
    static_assert(!trimmed || sums_dq,
                  "trimmed: of a block that a warpgroup does not see it computes dQ alone");
    static_assert(!split || (!sums_dq && !CFG.ping_pong),
                  "split_gradients: no registers for dQ, and no turns: choose dq_output OWN_KERNEL");
    static_assert(q_stages >= 2 && q_stages <= 4, "q_stages: 2 to 4");
    static_assert(k_stages == 1 || k_stages == 2, "k_stages: 1 or 2");
    static_assert(v_stages == 1 || v_stages == 2, "v_stages: 1 or 2");
    static_assert(!late_dq || k_stages == 2,
                  "late_dq: K of the item before is in use while the next item begins: two k_stages");
    static_assert(smem_bytes <= kBackwardMaxSmemBytes,
                  "the tiles exceed the 227 KiB of shared memory of a block");
};

}  // namespace flash::hopper
