// Accumulators to rows of 16-bit elements in global memory, 16 bytes a lane, without shared memory.
#pragma once

#include "common/fragments.cuh"
#include "common/ptx.cuh"
#include "common/quad.cuh"

namespace flash {

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
    transpose_quad(chunk.reg, lane % 4);
    return chunk;
}

}  // namespace flash
