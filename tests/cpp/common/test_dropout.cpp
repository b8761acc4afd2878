// The random words of a place, and what dropout keeps of four elements.
#include "check.h"
#include "common/dropout.cuh"

int main() {
    // Known answers of philox4x32-10.
    const flash::RandomWords zero = flash::philox(0, 0, 0, 0, 0);
    const uint32_t expected[] = {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u};
    for (int i = 0; i < 4; ++i) CHECK(zero.word[i] == expected[i]);

    const uint64_t seed = 0x299f31d0a4093822ull;
    const uint32_t threshold = 0x4ccccccdu;  // 0.3
    int n_kept = 0, n = 0;
    for (int b = 0; b < 2; ++b)
        for (int h = 0; h < 3; ++h)
            for (int q = 0; q < 64; q += q % 8 == 7 ? 9 : 1)  // those whose bit 3 is 0
                for (int k = 0; k < 64; k += 2) {
                    const uint32_t stays = flash::kept(seed, threshold, b, h, q, k);
                    float p[4] = {1, 2, 3, 4};
                    flash::drop(stays, p[0], p[1], p[2], p[3]);
                    for (int i = 0; i < 4; ++i) {
                        const uint32_t word = flash::random_word(seed, b, h, q + i / 2 * 8, k + i % 2);
                        CHECK((stays >> i & 1) == uint32_t(word >= threshold));
                        CHECK(p[i] == (word >= threshold ? float(i + 1) : 0.0f));
                        CHECK(flash::random_real(seed, b, h, q + i / 2 * 8, k + i % 2) ==
                              float(word >> 8) * 0x1p-24f);
                        n_kept += word >= threshold;
                        ++n;
                    }
                }
    CHECK(n == 2 * 3 * 64 * 64);
    CHECK(n_kept > 0.68 * n && n_kept < 0.72 * n);
    return report();
}
