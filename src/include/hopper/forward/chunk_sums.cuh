// What chunks of keys have left of an item, where one thread block takes several of them
// (common/chunks.cuh): in shared memory as far as there is room, in global memory beyond. Each thread has its
// own elements of its accumulator there, which nobody else reads.
#pragma once

#include "common/chunks.cuh"
#include "common/quad.cuh"
#include "hopper/forward/epilogue.cuh"
#include "hopper/forward/pipeline.cuh"

namespace flash::hopper {

template <typename Kernel>
struct ChunkSums {
    static constexpr int kVectors = Kernel::d_head_v / 8;  // of four floats: a thread's O
    static constexpr int kAside = 0, kRows = 1, kO = 2;    // slots: see put_aside, the sums and references, O
    static constexpr int kSlots = kO + kVectors, kInShared = Kernel::kept_slots;  // the first of them
    static_assert(kSlots == Kernel::wanted_kept_slots);
    static constexpr int kSlotBytes = kWarpgroupThreads * int(sizeof(float4));

    float4 *own;  // slot i is own[(i - kInShared) * kWarpgroupThreads]
    uint32_t own_shared;

    // Addresses are found here, and take no registers in the loops of tiles.
    FLASH_DEVICE ChunkSums(const ForwardKernelArgs &args, const SharedMemory<Kernel> &smem, int warpgroup) {
        const int thread = computed_here(static_cast<int>(threadIdx.x % kWarpgroupThreads));
        own = reinterpret_cast<float4 *>(args.kept_sums) + thread +
              (static_cast<int64_t>(blockIdx.x) * Kernel::n_consumers + warpgroup) * (kSlots - kInShared) *
                  kWarpgroupThreads;
        own_shared = smem.kept(warpgroup) + thread * int(sizeof(float4));
    }

    // Sums and references of a chunk that has ended, until its O is there.
    FLASH_DEVICE void put_aside(const RowState &state) const {
        write(kAside, make_float4(state.sum[0], state.sum[1], state.reference[0], state.reference[1]));
    }
    FLASH_DEVICE RowState aside() const {
        const float4 state = read(kAside);
        return {{state.x, state.y}, {state.z, state.w}};
    }

    // `state`: its sums are those of the thread, or of the first lane of a quad (join).
    FLASH_DEVICE void store(const float (&rmem_O)[Kernel::d_head_v / 2], const RowState &state) const {
        write(kRows, make_float4(quad_sum(state.sum[0]), quad_sum(state.sum[1]), state.reference[0],
                                 state.reference[1]));
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            write(kO + i,
                  make_float4(rmem_O[4 * i], rmem_O[4 * i + 1], rmem_O[4 * i + 2], rmem_O[4 * i + 3]));
        }
    }

    // Takes what is kept into O and `state`, of the chunk before it. The sums are then with the first lane of
    // each quad, and those of the others 0.
    FLASH_DEVICE void join(float (&rmem_O)[Kernel::d_head_v / 2], RowState &state,
                           float exponent_factor) const {
        // The vectors of O from this one on are on their way while the others are joined: those in global
        // memory, of a long O as many as registers hold.
        constexpr int kFirstAhead = max_of(max_of(kInShared - kO, kVectors - kMostAhead), 0);
        float4 ahead[max_of(kVectors - kFirstAhead, 1)];
#pragma unroll
        for (int i = kFirstAhead; i < kVectors; ++i) ahead[i - kFirstAhead] = read(kO + i);
        const float4 kept = read(kRows);
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
            const float4 o = i < kFirstAhead ? read(kO + i) : ahead[max_of(i - kFirstAhead, 0)];
            const float kept_o[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int r = j >> 1;
                rmem_O[4 * i + j] = fmaf(rmem_O[4 * i + j], of_next[r], __fmul_rn(kept_o[j], of_kept[r]));
            }
        }
    }

  private:
    static constexpr int kMostAhead = 16;  // vectors

    FLASH_DEVICE float4 read(int i) const {
        if (i < kInShared) return load_shared_float4(own_shared + i * kSlotBytes);
        return own[(i - kInShared) * kWarpgroupThreads];
    }
    FLASH_DEVICE void write(int i, float4 value) const {
        if (i < kInShared) {
            store_shared(own_shared + i * kSlotBytes, value);
        } else {
            own[(i - kInShared) * kWarpgroupThreads] = value;
        }
    }
};

}  // namespace flash::hopper
