// Everything about one kernel that is known at compile time: layouts, counts, and which
// configurations are refused, with the reason as text.
//
//                d_head                          B_c keys                       d_head
//           ┌─────────────┐                   ┌───────────┐                ┌─────────────┐
//     B_r   │      Q      │ warp_rows     S=P │           │ warp_rows   O  │             │ warp_rows
//   queries │- - - - - - -│ of each warp      │- - - - - -│                │- - - - - - -│
//           └─────────────┘                   └───────────┘                └─────────────┘
//
// Each warp owns warp_rows queries of S, P and O, in registers: only copies are shared between warps.
#pragma once

#include "common/cuda_utils.cuh"
#include "common/fragments.cuh"
#include "common/mask.cuh"
#include "common/mod.cuh"
#include "common/swizzling.cuh"
#include "flash_attention.cuh"

namespace flash::ampere {

inline constexpr int kMaxStages = 8;
inline constexpr int kMaxRegisters = 255;   // of a thread
inline constexpr int kKeptBlocks = 2;       // of an SM, for which there is memory to keep chunks in
inline constexpr int kOtherRegisters = 24;  // addresses, row references and sums, temporaries
// full[8] and empty[8], or, up to 5 of each, full_V too; 8 bytes each
inline constexpr int kBarrierBytes = 128;

// What an ANCHORED kernel runs again where scores have left its range: the same with every block's maximum as
// its reference, in smaller steps, for which no registers need to be spilled. It has the launch's threads and
// shared memory, so B_c never grows, and stays what a copy pass, 4 * n_warps rows, divides.
FLASH_HOST_DEVICE constexpr FlashForwardKernelConfig with_exact_softmax(FlashForwardKernelConfig config) {
    config.softmax_reference = SoftmaxReference::EXACT_SKIP_RESCALE;
    config.mbarrier = false;
    // Alone, a warp owns whole 16-row tiles, or it stays in its pair.
    config.paired_warps = config.paired_warps && config.B_r % (config.n_warps * kMmaM) != 0;
    const int least = common_multiple(4 * config.n_warps, config.paired_warps ? 2 * kMmaTile : kMmaTile);
    config.B_c = min_of(config.B_c, common_multiple(least, 32));
    const int key_tiles = config.B_c / kMmaTile;
    if (config.V_mma_load_K_tiles > 0 && key_tiles % config.V_mma_load_K_tiles != 0) {
        config.V_mma_load_K_tiles = 1;
    }
    config.fragments_ahead = min_of(config.fragments_ahead, key_tiles);
    return config;
}

template <FlashForwardKernelConfig CFG, ForwardTraits TRAITS, typename MOD = NoMod>
struct StaticForwardKernelConfig {
    using Mod = MOD;  // functions of the user's
    static constexpr bool has_mod = is_mod<MOD>;
    static constexpr bool mod_changes_scores = changes_scores<MOD>();
    static constexpr bool mod_hides_keys = hides_keys<MOD>();
    static constexpr bool drops = drops_weights<MOD>;
    static constexpr FlashForwardKernelConfig cfg = CFG;
    static constexpr ForwardTraits traits = TRAITS;
    static constexpr DType dtype = CFG.dtype;
    static constexpr int d_head = CFG.d_head;
    static constexpr int B_r = CFG.B_r;
    static constexpr int mask_groups = 1;  // of rows, with kinds of tiles of their own (mod_tiles.cuh)
    static constexpr int B_c = CFG.B_c;
    static constexpr int n_threads = CFG.n_warps * kWarpSize;
    // What __launch_bounds__ asks for: 8 warps on an SM leave each thread all of its 255 registers. If
    // nothing is asked for, ptxas spills some kernels down to the next occupancy step by itself.
    static constexpr int min_blocks_per_sm = max_of(1, 8 / CFG.n_warps);

    static_assert(dtype == DType::FP16 || dtype == DType::BF16, "dtype must be FP16 or BF16");
    static_assert(d_head > 0 && d_head % 64 == 0, "d_head must be a multiple of 64");
    static_assert(CFG.n_warps >= 2 && CFG.n_warps % 2 == 0,
                  "n_warps must be even: 8 threads copy a row, and a pass must cover a multiple of 8 rows");
    static_assert(CFG.n_warps <= 32, "n_warps must be at most 32, a thread block's 1024 threads");
    // Warps that share their rows: in a pair each has one half of d_head, in both products.
    static constexpr bool paired_warps = CFG.paired_warps;
    static constexpr int warps_per_group = paired_warps ? 2 : 1;
    static constexpr int n_groups = CFG.n_warps / warps_per_group;
    static_assert(
        B_r > 0 && B_r % (n_groups * kMmaM) == 0,
        "B_r must be a multiple of 16 * n_warps, or half of that with paired_warps: a warp owns whole "
        "16-row mma tiles");
    static_assert(B_c > 0 && B_c % kMmaTile == 0, "B_c must be a multiple of 16, the k of one mma");

    static constexpr int warp_rows = B_r / n_groups;
    static constexpr int m_tiles = warp_rows / kMmaM;
    static constexpr int warp_d = d_head / warps_per_group;  // columns of Q and K, and of V and O
    static constexpr int warp_keys = B_c / warps_per_group;  // keys of which the warp makes P
    static_assert(
        !paired_warps || (d_head % 128 == 0 && B_c % (2 * kMmaTile) == 0 && CFG.fragments_ahead > 0),
        "paired_warps needs d_head in multiples of 128, B_c in multiples of 32, and fragments_ahead");
    static_assert(!paired_warps || CFG.softmax_reference != SoftmaxReference::LAGGED,
                  "paired_warps and a LAGGED reference: growth is seen by one warp of the pair only");
    static constexpr int chunk_tiles =
        CFG.chunk_tiles;  // of a chunk of keys (common/chunks.cuh); 0: no chunks
    static constexpr bool has_parts = TRAITS.split || TRAITS.planned;
    static_assert(!(paired_warps && has_parts), "paired_warps: parts of split keys are not made for it");
    static_assert(!TRAITS.planned || (TRAITS.varlen && !TRAITS.split && !has_mod),
                  "planned: it needs varlen, has parts of its own, and no mods");

    // ---------------------------------------------------------------- shared memory
    static constexpr int box_bytes = warp_rows * warp_keys * 4;  // scores in fp32 (warp_pair.cuh)
    using QTile = SmemTile<B_r, d_head, CFG.swizzled>;           // (B_r, d_head); O's way out uses it too
    using KVTile = SmemTile<B_c, d_head, CFG.swizzled>;          // (B_c, d_head)
    static constexpr int smem_Q = 0;
    static constexpr int smem_K = smem_Q + QTile::bytes;
    static constexpr int smem_V = smem_K + KVTile::bytes;
    static constexpr int smem_barriers = smem_K + CFG.kv_stages * 2 * KVTile::bytes;  // K V, K V, …
    static constexpr int smem_boxes = smem_barriers + (CFG.mbarrier ? kBarrierBytes : 0);
    static constexpr int smem_bytes = smem_boxes + (paired_warps ? CFG.n_warps * box_bytes : 0);
    static_assert(smem_barriers == (B_r + 2 * CFG.kv_stages * B_c) * d_head * kElementBytes);

    static_assert(CFG.kv_stages >= 1 && CFG.kv_stages <= kMaxStages, "kv_stages must be 1 to 8");
    static_assert(!TRAITS.paged || CFG.async_copy,
                  "paged: pages are copied by async_copy; copies through registers are not made for them");
    static_assert(CFG.kv_stages == 1 || (CFG.async_copy && CFG.eager_load_blocks),
                  "kv_stages beyond 1 needs async_copy and eager_load_blocks");
    static_assert(!CFG.mbarrier || CFG.kv_stages > 1, "mbarrier needs kv_stages of 2 or more");

    // ---------------------------------------------------------------- softmax
    static constexpr bool approximate_reference = CFG.softmax_reference == SoftmaxReference::LAGGED ||
                                                  CFG.softmax_reference == SoftmaxReference::ANCHORED;
    static_assert(CFG.softmax_reference == SoftmaxReference::EXACT || CFG.optimized_softmax,
                  "softmax_reference other than EXACT needs optimized_softmax");
    static_assert(CFG.softmax_reference != SoftmaxReference::ANCHORED || dtype == DType::BF16,
                  "an ANCHORED softmax_reference needs BF16: P passes the range of FP16");
    static_assert(!(CFG.softmax_reference == SoftmaxReference::ANCHORED && has_parts),
                  "an ANCHORED softmax_reference is recomputed in other blocks of keys, and with split keys "
                  "their bounds are those of the parts");
    static_assert(!has_mod || !approximate_reference,
                  "a mod may hide any key: no block is known to show each query one, as an approximate "
                  "softmax_reference needs it");
    static_assert(!has_mod || !TRAITS.softcap, "with a mod, a soft cap is a part of it");
    static_assert(!(CFG.tensor_row_sums && drops),
                  "tensor_row_sums sums what the second product takes, and dropped weights count in the sum");
    static_assert(!(CFG.tensor_row_sums && has_parts),
                  "tensor_row_sums sums rounded P, which spoils the LSE that split keys are combined by");

    // ---------------------------------------------------------------- chunks of keys
    static_assert(CFG.chunk_tiles >= 0 &&
                      (CFG.chunk_tiles == 0 || (CFG.optimized_softmax && !approximate_reference &&
                                                !CFG.tensor_row_sums && !paired_warps)),
                  "chunk_tiles: 0, or positive with optimized_softmax, a softmax_reference EXACT or "
                  "EXACT_SKIP_RESCALE, and neither tensor_row_sums nor paired_warps");
    static_assert(CFG.chunk_tiles == 0 || !has_mod, "chunk_tiles: no mods");
    // What a thread block keeps of its rows from chunk to chunk, in global memory (kept_rows.cuh).
    static constexpr int kept_bytes = B_r * (d_head + 8) * 4;

    // ---------------------------------------------------------------- copies
    static constexpr int copy_rows = n_threads / QTile::row_chunks;  // rows the block copies in one pass
    static_assert(B_r % copy_rows == 0, "B_r must be a multiple of 4 * n_warps, the rows of one copy pass");
    static_assert(B_c % copy_rows == 0, "B_c must be a multiple of 4 * n_warps, the rows of one copy pass");

    // ---------------------------------------------------------------- a warp's fragments
    static constexpr int d_tiles = warp_d / kMmaTile;            // along the reduction of S = Q K^T
    static constexpr int key_tiles = B_c / kMmaTile;             // along the reduction of O += P V
    static constexpr int warp_key_tiles = warp_keys / kMmaTile;  // ... those of P that the warp makes

    static constexpr bool valid_tile_count(int n, int tiles) { return n == 0 || (n > 0 && tiles % n == 0); }
    static_assert(valid_tile_count(CFG.Q_mma_load_K_tiles, d_tiles),
                  "Q_mma_load_K_tiles must be 0 or divide d_head / 16");
    static_assert(valid_tile_count(CFG.K_mma_load_K_tiles, d_tiles),
                  "K_mma_load_K_tiles must be 0 or divide d_head / 16");
    static_assert(valid_tile_count(CFG.V_mma_load_K_tiles, key_tiles),
                  "V_mma_load_K_tiles must be 0 or divide B_c / 16");
    static constexpr bool holds_Q = CFG.Q_mma_load_K_tiles == 0;

    // Whether the machine code loads fragments in the order that the configuration states. Without that,
    // ptxas loads each as late as it can, which takes fewer registers: where those of the stated order would
    // not suffice, it is left to do so. `fragments`: registers of the fragments that are loaded when the
    // products begin; `scores`: whether S is live then.
    static constexpr bool orders_loads(int fragments, bool scores) {
        const int O_and_S = m_tiles * (warp_d + (scores ? B_c : 0)) / 2;
        const int Q = holds_Q ? m_tiles * d_tiles * 4 : 0;
        return O_and_S + Q + fragments + kOtherRegisters <= kMaxRegisters;
    }
    static_assert(CFG.fragments_ahead >= 0 && CFG.fragments_ahead <= key_tiles,
                  "fragments_ahead must be 0 to B_c / 16");
    static_assert(CFG.fragments_ahead == 0 || (CFG.Q_mma_load_K_tiles <= 1 && CFG.K_mma_load_K_tiles == 1 &&
                                               CFG.V_mma_load_K_tiles == 1 && !CFG.mma_double_buffer_loads),
                  "fragments_ahead loads fragment by fragment: K and V tiles must be 1, Q tiles 0 or 1, and "
                  "mma_double_buffer_loads off");
};

}  // namespace flash::ampere
