// Sums of a fixed order: the parts of a tile of dQ are added by one block of keys after the other, those with
// the lower numbers first. Blocks with lower numbers have started before, so whoever waits is waited for by
// none of those. The first writes its part, so that nothing needs to be cleared; the last takes the sum of
// the others into its registers and leaves dQ rounded, so that nobody needs to convert it.
//
// A part is a warp's, and so is its counter, which only the block whose turn it is writes. It takes no
// memory: it is the part's first element of dQ until the last block leaves dQ there. A warp looks at the
// counter before the product whose result it will add, and tells the next block of its turn's end one product
// later: neither the counter's way nor that of the sums to the L2 cache is waited for, as long as blocks
// follow each other at a distance.
#pragma once

#include "common/ptx.cuh"

namespace flash::ampere {

FLASH_DEVICE int load_turn(const int *turn) {
    int now;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    return now;
}

// `now`: what load_turn gave earlier. Sums are only touched in the L2 cache, by instructions that depend on
// the counter's value: what other blocks did there before their turns' ends is done.
FLASH_DEVICE void wait_for_turn(const int *turn, int number, int now) {
    while (now != number) now = load_turn(turn);
    __syncwarp();
}

// `number`: of the turn that ends; the next one begins.
FLASH_DEVICE void end_turn(int *turn, int number, int lane) {
    __syncwarp();
    if (lane == 0) {
        asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(number + 1) : "memory");
    }
}

}  // namespace flash::ampere
