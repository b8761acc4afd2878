// Random bits of a place in the scores: Philox 4x32-10, the same on every device and for every tile.
//
// The key is a seed of 64 bits, the counter is made of the place alone:
//
//     counter = (k / 2, q without its bit 3, h, b)        word = k % 2 + 2 * (bit 3 of q)
//
// so that one counter gives the four words of the elements that a thread holds of 16 rows and 8 columns of an
// accumulator: queries i and i + 8, keys j and j + 1. flash_helpers/mods/philox.py computes the same.
#pragma once

#include <cstdint>

#include "common/cuda_utils.cuh"

namespace flash {

struct RandomWords {
    uint32_t word[4];
};

FLASH_HOST_DEVICE RandomWords philox(uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3, uint64_t seed) {
    uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = uint64_t(0xD2511F53u) * x0, product1 = uint64_t(0xCD9E8D57u) * x2;
        x0 = uint32_t(product1 >> 32) ^ x1 ^ key0;
        x1 = uint32_t(product1);
        x2 = uint32_t(product0 >> 32) ^ x3 ^ key1;
        x3 = uint32_t(product0);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return {{x0, x1, x2, x3}};
}

// The words of (q, k), (q, k + 1), (q + 8, k), (q + 8, k + 1), of which bit 3 of q and bit 0 of k are 0.
FLASH_HOST_DEVICE RandomWords random_words(uint64_t seed, uint32_t b, uint32_t h, uint32_t q, uint32_t k) {
    return philox(k >> 1, (q >> 4) << 3 | (q & 7), h, b, seed);
}

FLASH_HOST_DEVICE uint32_t random_word(uint64_t seed, uint32_t b, uint32_t h, uint32_t q, uint32_t k) {
    const RandomWords words = random_words(seed, b, h, q, k);
    const uint32_t even = q & 8 ? words.word[2] : words.word[0], odd = q & 8 ? words.word[3] : words.word[1];
    return k & 1 ? odd : even;
}

// In [0, 1), of the first 24 bits.
FLASH_HOST_DEVICE float random_real(uint64_t seed, uint32_t b, uint32_t h, uint32_t q, uint32_t k) {
    return float(random_word(seed, b, h, q, k) >> 8) * 0x1p-24f;
}

}  // namespace flash
