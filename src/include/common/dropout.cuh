// Dropout: P is dropped behind the softmax, whose sums know nothing of it.
//
//     O = (P * keep) V / (1 - p)        dV = (P * keep)^T dO / (1 - p)        dP = (dO V^T) * keep / (1 - p)
//
// Forward, elements are set to 0 after their sum is taken and before the second product; the factor joins
// that of the end of a row. The log-sum-exp is that of the softmax. Backward, dS = P * (dP - D) with D =
// rowsum(dO * O) as without dropout. The seed is read from the device, so that a captured graph draws anew in
// each replay.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/mod.cuh"
#include "common/philox.cuh"

namespace flash {

struct Dropout {
    const int64_t *seed;  // of this call, in global memory
    uint32_t threshold;   // an element is dropped where its word is below: p * 2^32
    float scale;          // 1 / (1 - p)
};

// p: from 0 to below 1. As flash_helpers/mods/philox.py has the threshold.
inline Dropout make_dropout(double p, const void *seed) {
    const double exact = std::nearbyint(p * 0x1p32);
    return {static_cast<const int64_t *>(seed),
            exact < double(UINT32_MAX) ? static_cast<uint32_t>(exact) : UINT32_MAX,
            static_cast<float>(1.0 / (1.0 - p))};
}

// Of the elements (q, k), (q, k + 1), (q + 8, k), (q + 8, k + 1) those that stay, from bit 0 on; bit 3 of q
// and bit 0 of k are 0, as of the first of a thread's four elements in accumulators of m16n8 and of wgmma.
FLASH_HOST_DEVICE uint32_t kept(uint64_t seed, uint32_t threshold, int b, int h, int q, int k) {
    const RandomWords words = random_words(seed, uint32_t(b), uint32_t(h), uint32_t(q), uint32_t(k));
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= uint32_t(words.word[i] >= threshold) << i;
    return bits;
}

// Where rows are keys, a lane has queries q and q + 1 of one key, and a neighbour has those of the other key
// of the pair: one of the two finds the bits of query q for both, the other those of query q + 1. `own`:
// what this lane has found, of many pairs; `other`: what its neighbour has. Of four bits those of this lane's
// key, of the queries q, q + 1, q + 8, q + 9. `odd`: of the lane's key.
FLASH_HOST_DEVICE uint32_t kept_of_key(uint32_t own, uint32_t other, bool odd) {
    return odd ? (own & 0xaaaaaaaau) | (other & 0xaaaaaaaau) >> 1
               : (own & 0x55555555u) | (other & 0x55555555u) << 1;
}

// 1 / (1 - p) of a launch; 1 of a kernel that drops nothing. `args`: see mod_of.
template <typename Mod, typename Args>
FLASH_HOST_DEVICE float weight_scale(const Args &args) {
    if constexpr (drops_weights<Mod>) {
        return mod_of<Mod>(args).captured.dropout.scale;
    } else {
        return 1.0f;
    }
}

}  // namespace flash
