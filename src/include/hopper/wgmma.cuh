// wgmma: the warpgroup-wide product of 64 rows, with float32 accumulators in registers.
//
// `Wgmma<dtype, N>` has the forms attention needs, with B in shared memory:
//     multiply_shared              d (64, N) (+)= A (64, 16) B (N, 16)^T    A in shared memory: S = Q K^T
//     multiply_shared<true, true>  d (64, N) (+)= A (16, 64)^T B (16, N)    the same: dQ = dS K of dS^T
//     multiply_registers<false>    d (64, N) (+)= A (64, 16) B (N, 16)^T    A in registers
//     multiply_registers<true>     d (64, N) (+)= A (64, 16) B (16, N)      A in registers: O += P V
// The instruction names every accumulator register, so one specialisation a shape is written out by the
// macros below.
#pragma once

#include <cstdint>

#include "flash_attention.cuh"
#include "hopper/ptx_sm90.cuh"

namespace flash::hopper {

// Registers written before (accumulators, A fragments) may be read by the wgmma that follow.
FLASH_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of wgmma that `wgmma_wait` counts.
FLASH_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when at most kPending of the youngest groups are still in flight.
template <int kPending>
FLASH_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of these registers across the point: a running wgmma reads or
// writes them behind its back. No instruction.
template <int n>
FLASH_DEVICE void pin_registers(float (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

template <int n>
FLASH_DEVICE void pin_registers(uint32_t (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

template <DType kDType, int N>
struct Wgmma;

// Placeholders and operands of 8 accumulators: 16 columns of N.
#define FLASH_WGMMA_NAMES_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASH_WGMMA_NAMES_2 FLASH_WGMMA_NAMES_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASH_WGMMA_NAMES_3 FLASH_WGMMA_NAMES_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FLASH_WGMMA_NAMES_4 FLASH_WGMMA_NAMES_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH_WGMMA_NAMES_5 FLASH_WGMMA_NAMES_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASH_WGMMA_NAMES_6 FLASH_WGMMA_NAMES_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH_WGMMA_NAMES_7 FLASH_WGMMA_NAMES_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FLASH_WGMMA_NAMES_8 FLASH_WGMMA_NAMES_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH_WGMMA_NAMES_9 FLASH_WGMMA_NAMES_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FLASH_WGMMA_NAMES_10 FLASH_WGMMA_NAMES_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FLASH_WGMMA_NAMES_11 FLASH_WGMMA_NAMES_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FLASH_WGMMA_NAMES_12 FLASH_WGMMA_NAMES_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASH_WGMMA_NAMES_13 FLASH_WGMMA_NAMES_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FLASH_WGMMA_NAMES_14 FLASH_WGMMA_NAMES_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FLASH_WGMMA_NAMES_15 FLASH_WGMMA_NAMES_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FLASH_WGMMA_NAMES_16 FLASH_WGMMA_NAMES_15 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define FLASH_WGMMA_OPERANDS(i)                                                                     \
    "+f"(d[8 * i]), "+f"(d[8 * i + 1]), "+f"(d[8 * i + 2]), "+f"(d[8 * i + 3]), "+f"(d[8 * i + 4]), \
        "+f"(d[8 * i + 5]), "+f"(d[8 * i + 6]), "+f"(d[8 * i + 7])
#define FLASH_WGMMA_OPERANDS_1 FLASH_WGMMA_OPERANDS(0)
#define FLASH_WGMMA_OPERANDS_2 FLASH_WGMMA_OPERANDS_1, FLASH_WGMMA_OPERANDS(1)
#define FLASH_WGMMA_OPERANDS_3 FLASH_WGMMA_OPERANDS_2, FLASH_WGMMA_OPERANDS(2)
#define FLASH_WGMMA_OPERANDS_4 FLASH_WGMMA_OPERANDS_3, FLASH_WGMMA_OPERANDS(3)
#define FLASH_WGMMA_OPERANDS_5 FLASH_WGMMA_OPERANDS_4, FLASH_WGMMA_OPERANDS(4)
#define FLASH_WGMMA_OPERANDS_6 FLASH_WGMMA_OPERANDS_5, FLASH_WGMMA_OPERANDS(5)
#define FLASH_WGMMA_OPERANDS_7 FLASH_WGMMA_OPERANDS_6, FLASH_WGMMA_OPERANDS(6)
#define FLASH_WGMMA_OPERANDS_8 FLASH_WGMMA_OPERANDS_7, FLASH_WGMMA_OPERANDS(7)
#define FLASH_WGMMA_OPERANDS_9 FLASH_WGMMA_OPERANDS_8, FLASH_WGMMA_OPERANDS(8)
#define FLASH_WGMMA_OPERANDS_10 FLASH_WGMMA_OPERANDS_9, FLASH_WGMMA_OPERANDS(9)
#define FLASH_WGMMA_OPERANDS_11 FLASH_WGMMA_OPERANDS_10, FLASH_WGMMA_OPERANDS(10)
#define FLASH_WGMMA_OPERANDS_12 FLASH_WGMMA_OPERANDS_11, FLASH_WGMMA_OPERANDS(11)
#define FLASH_WGMMA_OPERANDS_13 FLASH_WGMMA_OPERANDS_12, FLASH_WGMMA_OPERANDS(12)
#define FLASH_WGMMA_OPERANDS_14 FLASH_WGMMA_OPERANDS_13, FLASH_WGMMA_OPERANDS(13)
#define FLASH_WGMMA_OPERANDS_15 FLASH_WGMMA_OPERANDS_14, FLASH_WGMMA_OPERANDS(14)
#define FLASH_WGMMA_OPERANDS_16 FLASH_WGMMA_OPERANDS_15, FLASH_WGMMA_OPERANDS(15)

// n16: N / 16. %R0 ... %R6: the first seven operands after the N / 2 accumulators. In the instruction, the
// two 1s keep the signs of A and B; the last numbers say which operands are stored reduction-first:
// neither for Q and K; V (rows are keys, the reduction) is.
#define FLASH_WGMMA(DTYPE, TYPE, N, n16, R0, R1, R2, R3, R4, R5, R6)                                     \
    template <>                                                                                          \
    struct Wgmma<DTYPE, N> {                                                                             \
        template <bool kAReductionFirst = false, bool kBReductionFirst = false>                          \
        static FLASH_DEVICE void multiply_shared(float (&d)[N / 2], uint64_t a, uint64_t b,              \
                                                 int accumulate) {                                       \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " R2                                          \
                         ", 0;\n"                                                                        \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                 \
                         " {" FLASH_WGMMA_NAMES_##n16 "}, " R0 ", " R1 ", p, 1, 1, " R3 ", " R4 ";\n}\n" \
                         : FLASH_WGMMA_OPERANDS_##n16                                                    \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(int{kAReductionFirst}),                  \
                           "n"(int{kBReductionFirst}));                                                  \
        }                                                                                                \
        template <bool kReductionFirst>                                                                  \
        static FLASH_DEVICE void multiply_registers(float (&d)[N / 2], const uint32_t *a, uint64_t b,    \
                                                    int accumulate) {                                    \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " R5                                          \
                         ", 0;\n"                                                                        \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                 \
                         " {" FLASH_WGMMA_NAMES_##n16 "}, {" R0 ", " R1 ", " R2 ", " R3 "}, " R4         \
                                                      ", p, 1, 1, " R6 ";\n}\n"                          \
                         : FLASH_WGMMA_OPERANDS_##n16                                                    \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),          \
                           "n"(int{kReductionFirst}));                                                   \
        }                                                                                                \
    };
#define FLASH_WGMMA_SHAPE(...)                   \
    FLASH_WGMMA(DType::FP16, "f16", __VA_ARGS__) \
    FLASH_WGMMA(DType::BF16, "bf16", __VA_ARGS__)

FLASH_WGMMA_SHAPE(48, 3, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
FLASH_WGMMA_SHAPE(64, 4, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
FLASH_WGMMA_SHAPE(80, 5, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
FLASH_WGMMA_SHAPE(96, 6, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
FLASH_WGMMA_SHAPE(112, 7, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
FLASH_WGMMA_SHAPE(128, 8, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
FLASH_WGMMA_SHAPE(144, 9, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
FLASH_WGMMA_SHAPE(160, 10, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
FLASH_WGMMA_SHAPE(176, 11, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
FLASH_WGMMA_SHAPE(192, 12, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
FLASH_WGMMA_SHAPE(256, 16, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

#undef FLASH_WGMMA_SHAPE
#undef FLASH_WGMMA
}  // namespace flash::hopper
