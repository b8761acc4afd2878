// What is known at compile time about the kernel that makes dQ by itself (dq_sum OWN_KERNEL): a thread block
// owns dq_B_r queries of one head and walks over blocks of dq_B_c keys; each warp owns an equal share of the
// queries, in all products, so that dQ is summed in registers, in one order.
#pragma once

#include "ampere/backward/static_kernel_configuration.cuh"

namespace flash::ampere {

template <FlashBackwardKernelConfig CFG, BackwardTraits TRAITS, typename MOD = NoMod>
struct StaticQueryGradientConfig {
    using Mod = MOD;
    static constexpr bool has_mod = is_mod<MOD>;
    static constexpr bool drops = drops_weights<MOD>;
    static constexpr DType handed = handed_dtype<MOD>(CFG.dtype);
    static constexpr FlashBackwardKernelConfig cfg = CFG;
    static constexpr BackwardTraits traits = TRAITS;
    static constexpr DType dtype = CFG.dtype;
    static constexpr int d_head = CFG.d_head;
    static constexpr int d_head_v = CFG.d_head_v;
    static constexpr int B_r = CFG.dq_B_r;
    static constexpr int B_c = CFG.dq_B_c;
    static constexpr int n_threads = CFG.dq_n_warps * kWarpSize;
    static constexpr int min_blocks_per_sm = max_of(1, 8 / CFG.dq_n_warps);
    static_assert(B_r > 0 && B_r % (CFG.dq_n_warps * kMmaM) == 0,
                  "dq_B_r must be a multiple of 16 * dq_n_warps");
    static_assert(B_c > 0 && B_c % kMmaTile == 0, "dq_B_c must be a multiple of 16");

    static constexpr int warp_rows = B_r / CFG.dq_n_warps;
    static constexpr int m_tiles = warp_rows / kMmaM;
    static constexpr int key_tiles = B_c / kMmaTile;
    static constexpr int d_tiles = d_head / kMmaTile;
    static constexpr int d_v_tiles = d_head_v / kMmaTile;

    using QTile = SmemTile<B_r, d_head, CFG.swizzled>;
    using dOTile = SmemTile<B_r, d_head_v, CFG.swizzled>;
    using KTile = SmemTile<B_c, d_head, CFG.swizzled>;
    using VTile = SmemTile<B_c, d_head_v, CFG.swizzled>;
    static constexpr int stages = CFG.stages;
    static constexpr int smem_Q = 0;
    static constexpr int smem_dO = smem_Q + QTile::bytes;
    static constexpr int smem_K = smem_dO + dOTile::bytes;
    static constexpr int smem_V = smem_K + stages * KTile::bytes;
    static constexpr int smem_rows = smem_V + stages * VTile::bytes;  // the LSE, then delta
    static constexpr int smem_barriers = smem_rows + 2 * B_r * sizeof(float);
    static constexpr int smem_bytes = smem_barriers + (1 + 4 * stages) * 8;

    static constexpr int copy_rows = n_threads / kPanelChunks;
    static_assert(B_r % copy_rows == 0 && B_c % copy_rows == 0 && copy_rows % kSwizzleRows == 0,
                  "dq_B_r and dq_B_c must be multiples of the rows of a copy pass, 4 * dq_n_warps");
};

}  // namespace flash::ampere
