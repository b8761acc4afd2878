// Dropout: P is dropped behind the softmax, whose sums know nothing of it.
//
//     O = (P * keep) V / (1 - p)        dV = (P * keep)^T dO / (1 - p)        dP = (dO V^T) * keep / (1 - p)
//
// Forward, elements are set to 0 after their sum is taken and before the second product; the factor joins
// that of the end of a row. The log-sum-exp is that of the softmax. Backward, dS = P * (dP - D) with D =
// rowsum(dO * O) as without dropout. The seed is read from the device, so that a captured graph draws anew in
// each replay.
#pragma once

#include <cstdint>

#include "common/philox.cuh"

namespace flash {

struct Dropout {
    const int64_t *seed;  // of this call, in global memory
    uint32_t threshold;   // an element is dropped where its word is below: p * 2^32
    float scale;          // 1 / (1 - p)
};

// Of the elements (q, k), (q, k + 1), (q + 8, k), (q + 8, k + 1) those that stay, from bit 0 on; bit 3 of q
// and bit 0 of k are 0, as of the first of a thread's four elements in accumulators of m16n8 and of wgmma.
FLASH_HOST_DEVICE uint32_t kept(uint64_t seed, uint32_t threshold, int b, int h, int q, int k) {
    const RandomWords words = random_words(seed, uint32_t(b), uint32_t(h), uint32_t(q), uint32_t(k));
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= uint32_t(words.word[i] >= threshold) << i;
    return bits;
}

// Sets to 0 what is dropped of four elements, two of row q and two of row q + 8.
FLASH_HOST_DEVICE void drop(uint32_t stays, float &p00, float &p01, float &p10, float &p11) {
    p00 = stays & 1 ? p00 : 0.0f;
    p01 = stays & 2 ? p01 : 0.0f;
    p10 = stays & 4 ? p10 : 0.0f;
    p11 = stays & 8 ? p11 : 0.0f;
}

}  // namespace flash
