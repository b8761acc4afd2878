// Which blocks of queries a thread block computes: the one of its own index, or, where chunks of keys
// (common/chunks.cuh) are kept in memory for as many thread blocks as run at a time, one after the other.
#pragma once

#include "ampere/forward/kernel_args.cuh"
#include "ampere/forward/static_kernel_configuration.cuh"
#include "common/planned_scheduler.cuh"
#include "common/ptx.cuh"

namespace flash::ampere {

// The number of the block in hand, of the order of block_coordinates.cuh.
template <typename Kernel>
struct BlockNumber {
    static constexpr bool changes = Kernel::chunk_tiles > 0;

    FLASH_DEVICE static int get() {
        if constexpr (changes) return uniform(shared());
        return blockIdx.x;
    }

    // To be called by all threads, which are done with the block in hand. False: there is no other.
    FLASH_DEVICE static bool advance(const ForwardKernelArgs &args, int n_blocks) {
        __syncthreads();
        if (threadIdx.x == 0) shared() = next(args);
        __syncthreads();
        return shared() < n_blocks;
    }
    FLASH_DEVICE static void start() {
        if (threadIdx.x == 0) shared() = blockIdx.x;
        __syncthreads();
    }

  private:
    FLASH_DEVICE static int &shared() {
        __shared__ int number;
        return number;
    }
    FLASH_DEVICE static int next(const ForwardKernelArgs &args) {
        const int n_blocks = gridDim.x;  // which have had the first numbers
        return n_blocks + (args.counter != nullptr ? atomicAdd(&args.counter->next, 1) : shared());
    }
};

// Calls `compute` for each of them.
template <typename Kernel, typename Compute>
FLASH_DEVICE void each_row_block(const ForwardKernelArgs &args, const Compute &compute) {
    const auto n_blocks = [&] {
        return args.grid.n_q_blocks * args.grid.total_heads * (Kernel::traits.split ? args.n_splits : 1);
    };
    const auto one_each = [&] { return static_cast<int>(gridDim.x) == n_blocks(); };
    BlockNumber<Kernel>::start();
#pragma unroll 1
    do {
        compute();
    } while (!one_each() && BlockNumber<Kernel>::advance(args, n_blocks()));
    if (!one_each() && threadIdx.x == 0) PlannedScheduler<Kernel, ForwardKernelArgs>::finish(args);
}

}  // namespace flash::ampere
