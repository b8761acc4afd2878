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

// The same row of one tile in float32, not rounded: two columns a lane, 8 bytes. `gmem`: its first column.
FLASH_DEVICE void store_float_row(char *gmem, const float (&tile)[4], int half, float factor, bool seen,
                                  int lane) {
    const float2 pair = seen ? make_float2(tile[2 * half] * factor, tile[2 * half + 1] * factor) : float2{};
    reinterpret_cast<float2 *>(gmem)[lane % 4] = pair;
}

}  // namespace flash
