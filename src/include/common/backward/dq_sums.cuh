// The float32 sums of dQ: where each of them lies, and how kernels add to them.
//
// The blocks of keys that a query sees add to its row of dQ, in any order or one after the other. What a warp
// adds are accumulators of mma.sync (fragments.cuh), so the sums lie as these do: tiles of 16 rows and 8
// columns, whose 128 values lie together in the order in which one instruction of a warp adds them:
//
//     sums[head][16-row tile][8-column tile][lane][accumulator]           adds of 16 bytes a lane, sm_90
//     sums[head][16-row tile][8-column tile][accumulator][lane]           adds of 4 bytes a lane, before that
//
// Rows are counted from the begin of a sequence, which lies at a multiple of kSumRows rows.
#pragma once

#include "backward.cuh"
#include "common/cuda_utils.cuh"
#include "common/fragments.cuh"
#include "common/ptx.cuh"
#include "common/sequence_rows.cuh"

namespace flash {

inline constexpr int kSumRows = 128;                     // what every kernel's tile of queries divides
inline constexpr int kSumTileFloats = kMmaM * kMmaN;     // 128

// Rows of the sums of one head: (batch, padded rows), or of packed queries (all padded rows).
FLASH_HOST_DEVICE constexpr int64_t padded_rows(int64_t rows) {
    return (rows + kSumRows - 1) / kSumRows * kSumRows;
}
FLASH_HOST_DEVICE constexpr int64_t sum_rows_of_head(bool packed, int seq_len_q, int64_t total_q, int batch) {
    return packed ? padded_rows(total_q + int64_t(batch) * kSumRows) : padded_rows(seq_len_q);
}

// Of all heads; `d_head`: of the kernel.
inline int64_t dq_sum_floats(const BackwardProblem &problem, int d_head) {
    const bool packed = problem.cu_seqlens_q != nullptr;
    const int64_t heads = int64_t(problem.n_heads) * (packed ? 1 : problem.batch);
    return heads * sum_rows_of_head(packed, problem.seq_len_q, problem.total_q, problem.batch) * d_head;
}

// The first row of a sequence's sums, of one head.
FLASH_HOST_DEVICE constexpr int64_t first_sum_row(bool packed, const SequenceRows &rows, int n_heads,
                                                  int head, int seq_len_q, int64_t total_q, int n_sequences,
                                                  int sequence) {
    const int64_t of_head = sum_rows_of_head(packed, seq_len_q, total_q, n_sequences);
    if (!packed) return (int64_t(rows.batch) * n_heads + head) * of_head;
    // Each sequence begins at a multiple of kSumRows, behind the last group of the one before it.
    return head * of_head + (rows.first_row / kSumRows + int64_t(sequence)) * kSumRows;
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
