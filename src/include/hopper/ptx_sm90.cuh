// The PTX instructions of the Hopper family that are neither wgmma nor bulk copies (tma/ptx_tma.cuh), one
// function each: register reallocation, matrix stores, and the few arithmetic instructions C++ has no name
// for.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"
#include "tma/ptx_tma.cuh"

namespace flash::hopper {

using namespace flash::tma;
using tma::mbarrier_wait;  // not ptx.cuh's, which makes other machine code

// ---------------------------------------------------------------- registers
template <int kRegisters>
FLASH_DEVICE void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
FLASH_DEVICE void acquire_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---------------------------------------------------------------- stores
FLASH_DEVICE void stmatrix_x4(uint32_t address, uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v0),
                 "r"(v1), "r"(v2), "r"(v3)
                 : "memory");
}

// 8 bytes.
FLASH_DEVICE void store_shared_pair(uint32_t address, uint32_t v0, uint32_t v1) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v0), "r"(v1) : "memory");
}

// 16 bytes to global memory, marked as not read again soon.
FLASH_DEVICE void store_global_streaming(void *address, const uint32_t (&v)[4]) {
    asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v[0]), "r"(v[1]),
                 "r"(v[2]), "r"(v[3])
                 : "memory");
}

// Adds four floats to those at `address`, a multiple of 16; nobody waits for it.
FLASH_DEVICE void add_global_floats(float *address, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a), "f"(b),
                 "f"(c), "f"(d)
                 : "memory");
}

// ---------------------------------------------------------------- arithmetic
// Logical shift right that gives 0 for n >= 32.
FLASH_DEVICE uint32_t shift_right_clamped(uint32_t value, int n) {
    uint32_t result;
    asm("shr.b32 %0, %1, %2;" : "=r"(result) : "r"(value), "r"(n));
    return result;
}

}  // namespace flash::hopper
