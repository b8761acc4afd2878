// The float32 sums of dQ: where each of them lies, and how kernels add to them.
//
// The blocks of keys that a query sees add to its row of dQ, in any order or one after the other. What a warp
// adds are accumulators of mma.sync (fragments.cuh), so the sums lie as these do: tiles of 16 rows and 8
// columns, whose 128 values lie together in the order in which one instruction of a warp adds them:
//
//     sums[head][16-row tile][8-column tile][lane][accumulator]           adds of 16 bytes a lane, sm_90
//     sums[head][16-row tile][8-column tile][accumulator][lane]           adds of 4 bytes a lane, before that
//
// There are as many 8-column tiles as the tensor has columns for. Rows are counted from the begin of a
// sequence, which begins with a tile of its own.
#pragma once

#include "backward.cuh"
#include "common/backward/row_tiles.cuh"
#include "common/cuda_utils.cuh"
#include "common/fragments.cuh"
#include "common/ptx.cuh"

namespace flash {

inline constexpr int kGroupRows = 128;                // that a block of the kernels before and after works on
inline constexpr int kSumTileFloats = kMmaM * kMmaN;  // 128

inline int64_t dq_sum_floats(const BackwardProblem &problem) {
    return row_tiles(problem).of_all_heads(problem.n_heads) * kMmaM * problem.d_head;
}

#if defined(__CUDACC__)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kVectorAdds = true;
#else
inline constexpr bool kVectorAdds = false;
#endif

// Adds a warp's accumulators to a tile of sums; `tile`: its first one.
FLASH_DEVICE void add_to_sums(float *tile, int lane, const float (&values)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(tile + 4 * lane),
                 "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
                 : "memory");
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(tile + kWarpSize * i + lane),
                     "f"(values[i])
                     : "memory");
    }
#endif
}

// In place of what is there.
FLASH_DEVICE void store_sums(float *tile, int lane, const float (&values)[4]) {
    if constexpr (kVectorAdds) {
        __stcg(reinterpret_cast<float4 *>(tile + 4 * lane),
               make_float4(values[0], values[1], values[2], values[3]));
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) __stcg(tile + kWarpSize * i + lane, values[i]);
    }
}

// What a lane's accumulators of a tile have come to; from the L2 cache, where others have added to them.
FLASH_DEVICE void read_sums(float (&values)[4], const float *tile, int lane) {
    if constexpr (kVectorAdds) {
        const float4 four = __ldcg(reinterpret_cast<const float4 *>(tile + 4 * lane));
        values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = __ldcg(tile + kWarpSize * i + lane);
    }
}
#endif

}  // namespace flash
