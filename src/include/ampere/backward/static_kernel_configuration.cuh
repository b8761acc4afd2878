// Everything about one backward kernel that is known at compile time: layouts, counts, and which
// configurations are refused, with the reason as text.
//
// A thread block owns B_c keys of one head of K and V and walks over tiles of B_r queries. Half of its warps,
// the score warps, make S^T and P^T and hold dV; the other half, the gradient warps, make dP^T and dS^T and
// hold dK:
//
//                     B_r queries                 d_head_v                    B_r queries d_head
//                   ┌─────────────┐             ┌──────────┐                ┌─────────────┐ ┌──────────┐
//      B_c    S^T   │             │ warp_keys   │    dV    │         dP^T   │             │           │    dK
//      │
//     keys    P^T   │- - - - - - -│             │- - - - - │         dS^T   │- - - - - - -│           │- - -
//     - - │
//                   └─────────────┘             └──────────┘                └─────────────┘ └──────────┘
//
// Each warp of either half owns warp_keys keys, or shares them with the warp beside it (paired_warps): then
// each has one half of the queries of S^T or dP^T, and one half of the columns of dV or dK.
#pragma once

#include "backward.cuh"
#include "common/cuda_utils.cuh"
#include "common/fragments.cuh"
#include "common/mod.cuh"
#include "common/swizzling.cuh"
#if defined(__CUDACC__)  // host tests read the rest
#include "common/backward/modified_score.cuh"
#endif

namespace flash::ampere {

inline constexpr int kMaxBackwardStages = 3;

// dS is made of P in FP16, times 2^shift: 11 bits of every P above 2^-26, where the 8 bits of BF16 would be
// half of the error of dQ and dK. P below 2^-37 counts as 0 there, beside a delta that the rounding of O has
// moved by 2^-9. The kernels carry the factor in all that follows, where BF16 and float32 have room for it,
// and take it out in the end. P is 1 at most, but for roundings, and an LSE that is not of these scores: from
// 16 on it counts as 16.
FLASH_HOST_DEVICE constexpr int probability_shift(DType dtype) { return dtype == DType::BF16 ? 12 : 0; }
FLASH_HOST_DEVICE constexpr float unshifted(DType dtype) { return 1.0f / (1 << probability_shift(dtype)); }

// The type in which P is handed on to dS. Derivatives of users' functions need the range of BF16.
template <typename Mod>
constexpr DType handed_dtype(DType dtype) {
    return scales_gradients<Mod>() ? dtype : DType::FP16;
}

#if defined(__CUDACC__)
template <DType kHanded>
FLASH_DEVICE uint32_t pack_handed(float low, float high) {
    return kHanded == DType::FP16 ? pack_finite(low, high) : pack<kHanded>(low, high);
}
#endif

template <FlashBackwardKernelConfig CFG, BackwardTraits TRAITS, typename MOD = NoMod>
struct StaticBackwardKernelConfig {
    using Mod = MOD;  // functions of the user's
    static constexpr bool has_mod = is_mod<MOD>;
    static constexpr bool drops = drops_weights<MOD>, signs_dropped = flash::signs_dropped<MOD>();
    static_assert(!has_mod || !TRAITS.softcap, "with a mod, a soft cap is a part of it");
    static constexpr FlashBackwardKernelConfig cfg = CFG;
    static constexpr BackwardTraits traits = TRAITS;
    static constexpr DType dtype = CFG.dtype;
    static constexpr int d_head = CFG.d_head;
    static constexpr int d_head_v = CFG.d_head_v;
    static constexpr int B_r = CFG.B_r;
    static constexpr int B_c = CFG.B_c;
    static constexpr int n_threads = CFG.n_warps * kWarpSize;
    static constexpr int min_blocks_per_sm = max_of(1, 8 / CFG.n_warps);

    static_assert(dtype == DType::FP16 || dtype == DType::BF16, "dtype must be FP16 or BF16");
    static_assert(d_head > 0 && d_head % 64 == 0 && d_head_v > 0 && d_head_v % 64 == 0,
                  "d_head and d_head_v must be multiples of 64");
    static_assert(CFG.n_warps >= 4 && CFG.n_warps % 4 == 0 && CFG.n_warps <= 16,
                  "n_warps must be 4, 8, 12 or 16");
    static_assert(B_r == 64 || B_r == 128, "B_r must be 64 or 128: rows of dS^T are panels of 64 queries");

    // ---------------------------------------------------------------- warps
    static constexpr int role_warps = CFG.n_warps / 2;  // score warps; gradient warps
    static constexpr int role_threads = role_warps * kWarpSize;
    static constexpr bool paired_warps = CFG.paired_warps;
    static constexpr int warps_per_group = paired_warps ? 2 : 1;
    static constexpr int n_groups = role_warps / warps_per_group;
    static constexpr int warp_keys = B_c / n_groups;
    static constexpr int m_tiles = warp_keys / kMmaM;
    static constexpr int warp_queries = B_r / warps_per_group;  // of S^T, dP^T
    static constexpr int warp_query_tiles = warp_queries / kMmaTile;
    static constexpr int query_tiles = B_r / kMmaTile;  // the reduction of dV and dK
    static constexpr int warp_d = d_head / warps_per_group;
    static constexpr int warp_d_v = d_head_v / warps_per_group;
    static_assert(B_c > 0 && B_c % (n_groups * kMmaM) == 0,
                  "B_c must be a multiple of 16 times the warps, or pairs, of one role");
    static_assert(!paired_warps || (d_head % 128 == 0 && d_head_v % 128 == 0),
                  "paired_warps halves d_head and d_head_v: multiples of 128");
    // The gradient warps take something else than what the score warps multiply by dO.
    static constexpr bool hands_over_apart =
        dtype == DType::BF16 || TRAITS.softcap || scales_gradients<MOD>() || drops;
    static constexpr DType handed = handed_dtype<MOD>(dtype);
    static constexpr bool holds_K = CFG.holds_K;
    static constexpr bool holds_V = CFG.holds_V;

    // ---------------------------------------------------------------- dQ = dS K
    static constexpr bool makes_dQ = CFG.dq_sum != DQSum::OWN_KERNEL;
    static constexpr bool both_roles = CFG.dq_warps == DQWarps::BOTH;
    static constexpr int dq_warps = both_roles ? CFG.n_warps : role_warps;  // of one tile of dQ
    static constexpr int dq_rows = 32;
    static constexpr int dq_row_warps = B_r / dq_rows;
    static constexpr int dq_column_warps = max_of(1, dq_warps / dq_row_warps);
    static constexpr int dq_columns = d_head / dq_column_warps;
    static constexpr int dq_m_tiles = dq_rows / kMmaM;
    static_assert(
        !makes_dQ || (dq_warps % dq_row_warps == 0 && dq_columns % kMmaTile == 0 &&
                      dq_columns * dq_column_warps == d_head),
        "the warps that make dQ divide its tile of B_r x d_head in parts of 32 rows and a multiple of "
        "16 columns");
    static_assert(!makes_dQ || dq_column_warps == 1 || dq_column_warps == 2 || dq_column_warps == 4,
                  "1, 2 or 4 warps share the columns of dQ");

    static_assert(CFG.dq_sum != DQSum::ORDERED || dq_columns % (2 * kMmaTile) == 0,
                  "with ordered sums a warp stores its part of dQ, a multiple of 32 columns");

    // Whether a role takes part in the dQ of tile number `tile`.
    static constexpr bool score_warps_make_dQ = makes_dQ && CFG.dq_warps != DQWarps::GRADIENT;
    static constexpr bool gradient_warps_make_dQ = makes_dQ && CFG.dq_warps != DQWarps::SCORE;

    // ---------------------------------------------------------------- shared memory
    using KTile = SmemTile<B_c, d_head, CFG.swizzled>;
    using VTile = SmemTile<B_c, d_head_v, CFG.swizzled>;
    using QTile = SmemTile<B_r, d_head, CFG.swizzled>;
    using dOTile = SmemTile<B_r, d_head_v, CFG.swizzled>;
    using ScoreTile = SmemTile<B_c, B_r, CFG.swizzled>;  // P^T, dS^T: rows are keys

    static constexpr int stages = CFG.stages;
    static constexpr int ds_slots = CFG.ds_slots;
    static_assert(stages >= 1 && stages <= kMaxBackwardStages, "stages must be 1 to 3");
    static_assert(ds_slots >= 1 && ds_slots <= 2, "ds_slots must be 1 or 2");

    static constexpr int row_bytes = B_r * sizeof(float);  // of the LSE, and of delta, of a tile
    static constexpr int smem_K = 0;
    static constexpr int smem_V = smem_K + KTile::bytes;
    static constexpr int smem_Q = smem_V + VTile::bytes;
    static constexpr int smem_dO = smem_Q + stages * QTile::bytes;
    static constexpr int smem_P = smem_dO + stages * dOTile::bytes;
    static constexpr int smem_dS = smem_P + (paired_warps && hands_over_apart ? 2 : 1) * ScoreTile::bytes;
    static constexpr int smem_rows = smem_dS + (makes_dQ || paired_warps ? ds_slots * ScoreTile::bytes : 0);
    static constexpr int smem_barriers = smem_rows + stages * 2 * row_bytes;
    static constexpr int n_barriers = 2 + 4 * stages + 2 * role_warps + 2 * ds_slots;
    static constexpr int smem_bytes = smem_barriers + n_barriers * 8;

    // ---------------------------------------------------------------- copies: by the warps of one role
    static constexpr int copy_rows = role_threads / kPanelChunks;  // rows of one pass
    static_assert(B_r % copy_rows == 0 && B_c % copy_rows == 0 && copy_rows % kSwizzleRows == 0,
                  "B_r and B_c must be multiples of the rows of a copy pass, 2 * n_warps");
    static_assert(role_threads >= B_r, "each of B_r rows has a thread that copies its LSE");

    // ---------------------------------------------------------------- fragments along d
    static constexpr int d_tiles = d_head / kMmaTile;
    static constexpr int d_v_tiles = d_head_v / kMmaTile;
};

}  // namespace flash::ampere
