// Accumulators to rows of 16-bit elements in global memory, 16 bytes a lane, without shared memory.
#pragma once

#include "common/fragments.cuh"
#include "common/ptx.cuh"

namespace flash {

// Four lanes of a quad hold word[i] of place i each; afterwards lane q of the quad holds place q of all four,
// in the order of the lanes: a transpose of 4 x 4 words.
FLASH_DEVICE void transpose_in_quad(uint32_t (&word)[4], int lane) {
    const bool odd = lane & 1, high = lane & 2;
    // Words 1 and 0, 3 and 2 change places between neighbours ...
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t given = odd ? word[i] : word[i + 1];
        const uint32_t taken = __shfl_xor_sync(kAllLanes, given, 1);
        (odd ? word[i] : word[i + 1]) = taken;
    }
    // ... and words 2 and 0, 3 and 1 between lanes two apart.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t given = high ? word[i] : word[i + 2];
        const uint32_t taken = __shfl_xor_sync(kAllLanes, given, 2);
        (high ? word[i] : word[i + 2]) = taken;
    }
}

// The 32 columns of four neighbouring accumulator tiles, for row lane / 4 + 8 * half, times `factor`: the
// chunk of 8 columns that this lane stores.
template <DType kDType, typename Tiles>
FLASH_DEVICE Chunk row_chunk(const Tiles &tiles, int first_tile, int half, float factor, int lane) {
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float (&tile)[4] = tiles[first_tile + i];
        chunk.reg[i] = pack<kDType>(tile[2 * half] * factor, tile[2 * half + 1] * factor);
    }
    transpose_in_quad(chunk.reg, lane);
    return chunk;
}

}  // namespace flash
