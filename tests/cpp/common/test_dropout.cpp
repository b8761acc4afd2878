// The random words of a place, and what dropout keeps of a thread's elements.
#include "check.h"
#include "common/dropout.cuh"
#include "common/fragments.cuh"

// What the lanes of a warp find of 16 keys by 16 queries, and what each takes of it.
void check_keys(uint64_t seed, uint32_t threshold, int b, int h, int first_query, int first_key) {
    uint32_t found[flash::kWarpSize];
    for (int lane = 0; lane < flash::kWarpSize; ++lane) {
        const flash::MatrixCoordinate at = flash::accumulator(lane, 0);
        const int odd = lane / 4 % 2, key = first_key + at.row - odd, query = first_query + at.column + odd;
        found[lane] = flash::kept(seed, threshold, b, h, query, key) |
                      flash::kept(seed, threshold, b, h, query, key + 8) << 4;
    }
    for (int lane = 0; lane < flash::kWarpSize; ++lane) {
        const uint32_t own = flash::kept_of_key(found[lane], found[lane ^ 4], lane / 4 % 2 != 0);
        for (int i = 0; i < 8; ++i) {  // four elements of two accumulators
            const flash::MatrixCoordinate at = flash::accumulator(lane, i);
            const int bit = 4 * (i / 2 % 2) + 2 * (i / 4) + i % 2;
            const uint32_t word = flash::random_word(seed, b, h, first_query + at.column, first_key + at.row);
            CHECK((own >> bit & 1) == uint32_t(word >= threshold));
        }
    }
}

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
                    for (int i = 0; i < 4; ++i) {
                        const uint32_t word = flash::random_word(seed, b, h, q + i / 2 * 8, k + i % 2);
                        CHECK((stays >> i & 1) == uint32_t(word >= threshold));
                        CHECK(flash::random_real(seed, b, h, q + i / 2 * 8, k + i % 2) ==
                              float(word >> 8) * 0x1p-24f);
                        n_kept += word >= threshold;
                        ++n;
                    }
                }
    CHECK(n == 2 * 3 * 64 * 64);
    check_keys(seed, threshold, 1, 2, 48, 32);
    check_keys(seed, threshold, 0, 0, 0, 0);
    check_keys(seed, 0x80000000u, 3, 1, 16, 112);

    // As flash_helpers.mods.philox.threshold: rounded to even, and never more than all but one word.
    const int64_t place = 0;
    CHECK(flash::make_dropout(0.5, &place).threshold == 0x80000000u);
    CHECK(flash::make_dropout(0x1p-33, &place).threshold == 0);
    CHECK(flash::make_dropout(0x3p-33, &place).threshold == 2);
    CHECK(flash::make_dropout(1 - 0x1p-40, &place).threshold == 0xffffffffu);
    CHECK(flash::make_dropout(0.75, &place).scale == 4.0f);
    CHECK(flash::make_dropout(0.75, &place).seed == &place);
    CHECK(n_kept > 0.68 * n && n_kept < 0.72 * n);
    return report();
}
