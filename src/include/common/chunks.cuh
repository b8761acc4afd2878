// Keys that are cut into chunks at fixed places: multiples of so many tiles, counted from key 0.
//
// A row begins anew with each chunk, and chunks are joined one after another, from the last to the first. So
// it makes no difference to its bits whether one thread block takes all chunks of a row
// (hopper/forward/chunk_sums.cuh, ampere/forward/kept_rows.cuh) or several take them and another kernel joins
// them (chunk_combine.cuh): all join with what stands here.
//
// Of a chunk there are, as of any row (row_end.cuh), the exponent of its reference, the sum l of its P and O,
// the sum of P V, not divided by l.
#pragma once

#include "common/ptx.cuh"

namespace flash {

// By what two chunks are multiplied, and the exponent of both together. A chunk that a row sees nothing of
// has l = 0, O = 0 and the exponent of the least reference, and leaves the other as it is.
struct ChunkWeights {
    float exponent, of_kept, of_next;

    FLASH_DEVICE ChunkWeights(float kept, float next)
        : exponent(fmaxf(kept, next)),
          of_kept(exp2_approx(kept - exponent)),
          of_next(exp2_approx(next - exponent)) {}

    // l, or an element of O.
    FLASH_DEVICE float join(float kept, float next) const {
        return fmaf(next, of_next, __fmul_rn(kept, of_kept));
    }
};

}  // namespace flash
