// What follows from a configuration for dQ's own kernel.
//
// Shared memory of a block:
//
//     Q slots     q_stages x (B_r, d)       a query block stays for its whole item
//     dO slots    q_stages x (B_r, d_v)
//     K ring      k_stages x (B_c, d)
//     V ring      v_stages x (B_c, d_v)
//     control     1 KiB: mbarriers, the item of each Q slot
#pragma once

#include "hopper/backward/static_kernel_configuration.cuh"

namespace flash::hopper {

template <HopperBackwardKernelConfig CFG, BackwardTraits TRAITS, typename MOD = NoMod>
struct StaticDqKernelConfig {
    using Mod = MOD;
    static constexpr bool has_mod = is_mod<MOD>;
    static constexpr bool drops = drops_weights<MOD>;
    static constexpr bool hides_scores = hides_keys<MOD>() && !changes_scores<MOD>() && !drops;
    static constexpr bool replaces_scores = changes_scores<MOD>() && !scales_gradients<MOD>();
    static constexpr HopperBackwardKernelConfig cfg = CFG;
    static constexpr BackwardTraits traits = TRAITS;
    static constexpr DType dtype = CFG.dtype;
    static constexpr int d_head = CFG.d_head, d_head_v = CFG.d_head_v;
    static constexpr int n_consumers = 2;
    static constexpr int B_r = n_consumers * kWarpgroupRows;
    static constexpr int B_c = CFG.dq_B_c;

    static constexpr int warpgroup_threads = 128;
    static constexpr int n_consumer_warps = n_consumers * 4;
    static constexpr int n_threads = (n_consumers + 1) * warpgroup_threads;
    static constexpr int producer_registers = 24, consumer_registers = 240;

    // For Scheduler: a whole warp takes items, for it writes dQ of rows that see no key.
    static constexpr bool warp_loads = true, paired_blocks = false;
    static constexpr int mail_slots = 0;

    static constexpr int q_bytes = tile_bytes(B_r, d_head), do_bytes = tile_bytes(B_r, d_head_v);
    static constexpr int k_bytes = tile_bytes(B_c, d_head), v_bytes = tile_bytes(B_c, d_head_v);
    // Two slots of everything where they fit, else first one of Q and dO.
    static constexpr int k_stages = 2;
    static constexpr int room = kBackwardMaxSmemBytes - kBackwardControlBytes - k_stages * k_bytes;
    static constexpr int q_stages = 2 * (q_bytes + do_bytes + v_bytes) <= room ? 2 : 1;
    static constexpr int v_stages = q_stages * (q_bytes + do_bytes) + 2 * v_bytes <= room ? 2 : 1;

    static constexpr int smem_q = 0;
    static constexpr int smem_do = smem_q + q_stages * q_bytes;
    static constexpr int smem_k = smem_do + q_stages * do_bytes;
    static constexpr int smem_v = smem_k + k_stages * k_bytes;
    static constexpr int smem_control = smem_v + v_stages * v_bytes;
    static constexpr int smem_bytes = smem_control + kBackwardControlBytes;

    static_assert(B_c % kMmaDepth == 0 && B_c >= 48 && B_c <= 128, "dq_B_c: a multiple of 16 from 48 to 128");
    static_assert(smem_bytes <= kBackwardMaxSmemBytes,
                  "dq_B_c: the tiles exceed the 227 KiB of shared memory of a block");
};

}  // namespace flash::hopper
