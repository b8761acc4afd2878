// What chunks of keys have left of an item, in global memory, where one thread block takes several of them
// (common/chunks.cuh). Each thread has its own elements of its accumulator there, which nobody else reads.
#pragma once

#include "common/chunks.cuh"
#include "common/quad.cuh"
#include "hopper/forward/epilogue.cuh"

namespace flash::hopper {

template <typename Kernel>
struct ChunkSums {
    static constexpr int kVectors = Kernel::d_head_v / 8;  // of four floats: a thread's O
    static constexpr int kSlots = kVectors + 1;            // ... with its sums and references

    float4 *own;  // slot i is own[i * kWarpgroupThreads]

    FLASH_DEVICE ChunkSums(const ForwardKernelArgs &args, int warpgroup)
        : own(reinterpret_cast<float4 *>(args.kept_sums) +
              (static_cast<int64_t>(blockIdx.x) * Kernel::n_consumers + warpgroup) * kSlots *
                  kWarpgroupThreads +
              threadIdx.x % kWarpgroupThreads) {}

    // `state`: its sums are those of the thread, or of the first lane of a quad (join).
    FLASH_DEVICE void store(const float (&rmem_O)[Kernel::d_head_v / 2], const RowState &state) const {
        own[kVectors * kWarpgroupThreads] = make_float4(quad_sum(state.sum[0]), quad_sum(state.sum[1]),
                                                        state.reference[0], state.reference[1]);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            own[i * kWarpgroupThreads] =
                make_float4(rmem_O[4 * i], rmem_O[4 * i + 1], rmem_O[4 * i + 2], rmem_O[4 * i + 3]);
        }
    }

    // Takes what is kept into O and `state`, of the chunk before it. The sums are then with the first lane of
    // each quad, and those of the others 0.
    FLASH_DEVICE void join(float (&rmem_O)[Kernel::d_head_v / 2], RowState &state,
                           float exponent_factor) const {
        const float4 kept = own[kVectors * kWarpgroupThreads];
        const float kept_sum[2] = {kept.x, kept.y}, kept_reference[2] = {kept.z, kept.w};
        float of_kept[2], of_next[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float kept_exponent = __fmul_rn(kept_reference[r], exponent_factor);
            const float next_exponent = __fmul_rn(state.reference[r], exponent_factor);
            const ChunkWeights weights(kept_exponent, next_exponent);
            const float sum = weights.join(kept_sum[r], quad_sum(state.sum[r]));
            state.sum[r] = (threadIdx.x & 3) == 0 ? sum : 0.f;
            if (kept_exponent > next_exponent) state.reference[r] = kept_reference[r];
            of_kept[r] = weights.of_kept;
            of_next[r] = weights.of_next;
        }
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const float4 o = own[i * kWarpgroupThreads];
            const float kept_o[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int r = j >> 1;
                rmem_O[4 * i + j] = fmaf(rmem_O[4 * i + j], of_next[r], __fmul_rn(kept_o[j], of_kept[r]));
            }
        }
    }
};

}  // namespace flash::hopper
