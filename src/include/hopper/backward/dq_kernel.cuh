// dQ by a kernel of its own: a block owns B_r queries of one (batch, head) at a time and goes over all keys
// that they see. Nothing is summed in global memory, so that equal calls give equal bits.
#pragma once

#include "common/backward/rows_of_none.cuh"
#include "hopper/backward/dq_consumer.cuh"
#include "hopper/backward/epilogue.cuh"

namespace flash::hopper {

extern __shared__ __align__(1024) uint8_t dq_smem[];

template <typename Kernel>
FLASH_DEVICE void compute_query_gradients(const CUtensorMap &q_map, const CUtensorMap &k_map,
                                          const CUtensorMap &v_map, const CUtensorMap &do_map,
                                          const BackwardKernelArgs &args) {
    constexpr BackwardTraits TRAITS = Kernel::traits;
    const DqSharedMemory<Kernel> smem{smem_address(dq_smem)};
    // Through a shuffle, so that the compiler knows it to be the same in the whole warp.
    const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / Kernel::warpgroup_threads, 0);
    if (threadIdx.x == 32) {
        prefetch_tensor_map(&q_map);
        prefetch_tensor_map(&k_map);
        prefetch_tensor_map(&v_map);
        prefetch_tensor_map(&do_map);
    }
    smem.initialise();
    if constexpr (TRAITS.varlen) {
        clear_gradient_rows_of_none(args.cu_seqlens_q, args.batch, args.total_q, args.dq, args.dq_strides,
                                    args.n_heads(), TRAITS.padded_head ? args.d_head : Kernel::d_head);
    }

    if (warpgroup == 0) {
        release_registers<Kernel::producer_registers>();
        if (threadIdx.x < kWarpSize) {
            DqLoadWarp<Kernel>{smem, BackwardMaps{q_map, k_map, v_map, do_map}, args}.run();
        }
    } else {
        acquire_registers<Kernel::consumer_registers>();
        DqConsumer<Kernel> consumer(args, smem, warpgroup - 1);
        run_dq_consumer(consumer);
    }
}

template <HopperBackwardKernelConfig CFG, BackwardTraits TRAITS>
__global__ void __launch_bounds__(StaticDqKernelConfig<CFG, TRAITS>::n_threads, 1)
    hopper_dq_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                     const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap do_map,
                     const __grid_constant__ BackwardKernelArgs args) {
    compute_query_gradients<StaticDqKernelConfig<CFG, TRAITS>>(q_map, k_map, v_map, do_map, args);
}

// The same with functions of the user's.
template <HopperBackwardKernelConfig CFG, BackwardTraits TRAITS, typename MOD>
__global__ void __launch_bounds__(StaticDqKernelConfig<CFG, TRAITS, MOD>::n_threads, 1)
    hopper_dq_mod_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                         const __grid_constant__ CUtensorMap v_map,
                         const __grid_constant__ CUtensorMap do_map,
                         const __grid_constant__ BackwardArgs<MOD> args) {
    compute_query_gradients<StaticDqKernelConfig<CFG, TRAITS, MOD>>(q_map, k_map, v_map, do_map, args);
}

}  // namespace flash::hopper
