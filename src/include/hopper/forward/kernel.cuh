// FlashAttention forward for compute capability 9.0.
//
// A block owns B_r query rows of one (batch, head) at a time and stays on its SM for many such items.
// Warpgroup 0 moves data (producer.cuh); the others compute, 64 rows each (consumer.cuh, work_loop.cuh);
// tiles of K and V pass between them through rings in shared memory (pipeline.cuh). S, P and O never leave
// registers until O is finished.
#pragma once

#include "common/ptx.cuh"
#include "common/rows_of_none.cuh"
#include "hopper/forward/planner.cuh"
#include "hopper/forward/producer.cuh"
#include "hopper/forward/streamed_tiles.cuh"
#include "hopper/forward/work_loop.cuh"

namespace flash::hopper {

extern __shared__ __align__(1024) uint8_t dynamic_smem[];

// Rows of the Q slots that no copy fills, because a block has room for more heads than those of its queries.
// What they hold is computed with, and must not say when references move.
template <typename Kernel>
FLASH_DEVICE void clear_idle_rows(const SharedMemory<Kernel> &smem, const ForwardKernelArgs &args) {
    if (args.planned.block_queries * args.planned.group == Kernel::B_r) return;
    for (int i = threadIdx.x * kChunkBytes; i < Kernel::q_stages * Kernel::q_bytes;
         i += Kernel::n_threads * kChunkBytes) {
        store_shared(smem.q(0) + i, make_int4(0, 0, 0, 0));
    }
    fence_async_proxy();  // wgmma must see it
}

// What a block does.
template <typename Kernel>
FLASH_DEVICE void run_block(const TensorMaps &maps, const KernelArgs<typename Kernel::Mod> &args) {
    constexpr ForwardTraits traits = Kernel::traits;
    const SharedMemory<Kernel> smem{smem_address(dynamic_smem)};
    // Through a shuffle, so that the compiler knows it to be the same in the whole warp.
    const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroupThreads, 0);
    if (threadIdx.x == 32 && (!Kernel::warp_loads || args.work.seq_len_k > 0)) {  // else there are no maps
        prefetch_tensor_map(&maps.q);
        prefetch_tensor_map(&maps.k);
        prefetch_tensor_map(&maps.v);
        if (Kernel::copies_streamed) prefetch_tensor_map(maps.streamed);
    }
    if constexpr (traits.planned) clear_idle_rows<Kernel>(smem, args);
    smem.initialise();
    if (traits.split || traits.planned) wait_for_prerequisites();

    if (warpgroup == 0) {
        release_registers<Kernel::registers.producer>();
        // As above where that shortens the loops of copies; elsewhere it costs two consumers registers.
        constexpr bool kSameInWarp = traits.paged && (traits.planned || Kernel::n_consumers == 1);
        const int warp = kSameInWarp ? __shfl_sync(kAllLanes, threadIdx.x / 32, 0) : threadIdx.x / 32;
        if constexpr (traits.planned) {
            if (traits.paged ? warp == 0 : threadIdx.x == 0) {
                LoadThread<Kernel>{smem, maps, args}.run_planned();
            }
            if (warp == 1) run_planner(smem, args);
            if (warp >= 2) {
                clear_planned_rows_of_none(args, args.output, args.work.n_heads, threadIdx.x - 64, 64);
            }
        } else if (Kernel::warp_loads ? warp == 0 : threadIdx.x == 0) {
            LoadThread<Kernel>{smem, maps, args}.run();
        } else if (!Kernel::direct_store && threadIdx.x == 32) {
            run_store_thread<Kernel>(smem, maps, args);
        } else if (warp >= 2) {  // these have little to do
            if constexpr (Kernel::begins_scores) run_diagonal_warps<Kernel>(smem, args, threadIdx.x - 64);
            if constexpr (!Kernel::warp_loads) {
                fill_rows_without_keys<Kernel>(args, threadIdx.x - 64, 64);
                if constexpr (Kernel::copies_streamed) {
                    const int group = warp - 2;
                    if (threadIdx.x % 32 == 0) run_streaming_thread<Kernel>(smem, maps.streamed, args, group);
                }
            } else if constexpr (traits.varlen && !traits.split) {
                clear_rows_of_none(args, args.o, args.o_strides, args.batch, args.work.n_heads,
                                   chunks_of_row<Kernel>(args), threadIdx.x - 64, 64);
            }
        }
    } else {
        acquire_registers<Kernel::registers.consumer>();
        Consumer<Kernel> consumer(args, smem, warpgroup - 1);
        run_consumer(consumer);
    }
    if (Kernel::paired_blocks) cluster_sync();  // the other block may still arrive at this one's barriers
}

template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
__global__ void __launch_bounds__(StaticForwardKernelConfig<CFG, TRAITS>::n_threads, 1)
    hopper_forward_kernel(const __grid_constant__ CUtensorMap q_map,
                          const __grid_constant__ CUtensorMap k_map,
                          const __grid_constant__ CUtensorMap v_map,
                          const __grid_constant__ CUtensorMap o_map,
                          const __grid_constant__ ForwardKernelArgs args) {
    run_block<StaticForwardKernelConfig<CFG, TRAITS>>({q_map, k_map, v_map, o_map}, args);
}

// The same with functions of the user's.
template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS, typename MOD>
__global__ void __launch_bounds__(StaticForwardKernelConfig<CFG, TRAITS, MOD>::n_threads, 1)
    hopper_forward_mod_kernel(const __grid_constant__ CUtensorMap q_map,
                              const __grid_constant__ CUtensorMap k_map,
                              const __grid_constant__ CUtensorMap v_map,
                              const __grid_constant__ CUtensorMap o_map,
                              const __grid_constant__ KernelArgs<MOD> args) {
    run_block<StaticForwardKernelConfig<CFG, TRAITS, MOD, false>>({q_map, k_map, v_map, o_map}, args);
}

// The same with copies of what they stream.
template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS, typename MOD>
__global__ void __launch_bounds__(StaticForwardKernelConfig<CFG, TRAITS, MOD>::n_threads, 1)
    hopper_forward_streaming_kernel(const __grid_constant__ CUtensorMap q_map,
                                    const __grid_constant__ CUtensorMap k_map,
                                    const __grid_constant__ CUtensorMap v_map,
                                    const __grid_constant__ CUtensorMap o_map,
                                    const __grid_constant__ CUtensorMap streamed_map,
                                    const __grid_constant__ KernelArgs<MOD> args) {
    run_block<StaticForwardKernelConfig<CFG, TRAITS, MOD>>({q_map, k_map, v_map, o_map, &streamed_map}, args);
}

}  // namespace flash::hopper
