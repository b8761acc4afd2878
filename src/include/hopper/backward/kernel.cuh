// FlashAttention backward for compute capability 9.0: dK, dV and the sums of dQ.
//
// A block owns B_c keys of one (batch, key head) at a time, goes over all queries that see them, and stays on
// its SM for many such items (key_items.cuh). Warpgroup 0 moves data (producer.cuh); two others compute, 64
// keys each (consumer.cuh, mainloop.cuh). S, P, dP, dK and dV never leave registers until dK and dV are
// finished; dS passes through shared memory, for dQ.
#pragma once

#include "common/backward/rows_of_none.cuh"
#include "hopper/backward/producer.cuh"
#include "hopper/backward/split_mainloop.cuh"

namespace flash::hopper {

extern __shared__ __align__(1024) uint8_t backward_smem[];

template <typename Kernel>
FLASH_DEVICE void compute_key_gradients(const CUtensorMap &q_map, const CUtensorMap &k_map,
                                        const CUtensorMap &v_map, const CUtensorMap &do_map,
                                        const BackwardKernelArgs &args) {
    constexpr BackwardTraits TRAITS = Kernel::traits;
    const BackwardSharedMemory<Kernel> smem{smem_address(backward_smem)};
    // Through a shuffle, so that the compiler knows it to be the same in the whole warp.
    const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / Kernel::warpgroup_threads, 0);
    if (threadIdx.x == 32) {
        prefetch_tensor_map(&q_map);
        prefetch_tensor_map(&k_map);
        prefetch_tensor_map(&v_map);
        prefetch_tensor_map(&do_map);
    }
    smem.initialise();
    wait_for_prerequisites();
    if constexpr (TRAITS.varlen) {
        clear_gradient_rows_of_none(args.cu_seqlens_k, args.batch, args.total_k, args.dk, args.dk_strides,
                                    args.n_heads_kv, TRAITS.padded_head ? args.d_head : Kernel::d_head);
        clear_gradient_rows_of_none(args.cu_seqlens_k, args.batch, args.total_k, args.dv, args.dv_strides,
                                    args.n_heads_kv, TRAITS.padded_head ? args.d_head_v : Kernel::d_head_v);
    }

    if (warpgroup == 0) {
        release_registers<Kernel::producer_registers>();
        const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpSize, 0);
        if (warp == 0) {
            BackwardLoadWarp<Kernel>{smem, BackwardMaps{q_map, k_map, v_map, do_map}, args}.run();
        } else if (warp == 1) {
            RowWarp<Kernel>{smem, args}.run();
        } else if (Kernel::stages_dq) {
            DqReducer<Kernel>{smem, args, warp - 2}.run();
        }
    } else {
        acquire_registers<Kernel::consumer_registers>();
        BackwardConsumer<Kernel> consumer(args, smem, warpgroup - 1);
        if constexpr (!Kernel::split) {
            run_backward_consumer(consumer);
        } else if (warpgroup == 1) {
            run_split_scores(consumer);
        } else {
            run_split_gradients(consumer);
        }
    }
}

template <HopperBackwardKernelConfig CFG, BackwardTraits TRAITS>
__global__ void __launch_bounds__(StaticBackwardKernelConfig<CFG, TRAITS>::n_threads, 1)
    hopper_backward_kernel(const __grid_constant__ CUtensorMap q_map,
                           const __grid_constant__ CUtensorMap k_map,
                           const __grid_constant__ CUtensorMap v_map,
                           const __grid_constant__ CUtensorMap do_map,
                           const __grid_constant__ BackwardKernelArgs args) {
    compute_key_gradients<StaticBackwardKernelConfig<CFG, TRAITS>>(q_map, k_map, v_map, do_map, args);
}

// The same with functions of the user's.
template <HopperBackwardKernelConfig CFG, BackwardTraits TRAITS, typename MOD>
__global__ void __launch_bounds__(StaticBackwardKernelConfig<CFG, TRAITS, MOD>::n_threads, 1)
    hopper_backward_mod_kernel(const __grid_constant__ CUtensorMap q_map,
                               const __grid_constant__ CUtensorMap k_map,
                               const __grid_constant__ CUtensorMap v_map,
                               const __grid_constant__ CUtensorMap do_map,
                               const __grid_constant__ BackwardArgs<MOD> args) {
    compute_key_gradients<StaticBackwardKernelConfig<CFG, TRAITS, MOD>>(q_map, k_map, v_map, do_map, args);
}

}  // namespace flash::hopper
