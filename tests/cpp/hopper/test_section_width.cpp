// The widths of sections in src/include/hopper/forward/section_width.cuh, against the limits that it states.
#include <cstdio>

#include "hopper/forward/section_width.cuh"
#include "require.h"

using namespace flash::hopper;

static void test_section_width() {
    // d 64: 256 bytes a key and value; 8 KiB a key give 32 heads. d 128: 16; d 256: 8.
    REQUIRE(section_width(false, 512, 512, 256) == 32, "d 64");
    REQUIRE(section_width(false, 512, 512, 512) == 16, "d 128");
    REQUIRE(section_width(false, 512, 512, 1024) == 8, "d 256");
    // 32 MiB hold 4 heads of 8 MiB (16384 keys at d 128), and one head that is larger than all of it.
    REQUIRE(section_width(false, 16384, 16384, 512) == 4, "L2");
    REQUIRE(section_width(false, 1, 1 << 20, 1024) == 1, "one head at least");
    REQUIRE(section_width(true, 2048, 2048, 512) == 32 && section_width(true, 4096, 4096, 512) == 16,
            "causal");
    REQUIRE(section_width(true, 3969, 4090, 512) == 16 && section_width(true, 3968, 4090, 512) == 32,
            "as many blocks as of 4096 queries");
    REQUIRE(section_width(false, 1, 0, 512) == 1, "no keys");
}

int main() {
    test_section_width();
    std::puts("section width: ok");
}
