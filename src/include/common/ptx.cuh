// The PTX instructions the kernels are made of, one function each; sm_80 and newer.
// Shared memory addresses are 32-bit, as the instructions take them.
#pragma once

#include "common/cuda_utils.cuh"
#include "flash_attention.cuh"

namespace flash {

FLASH_DEVICE uint32_t smem_address(const void *smem) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

inline constexpr uint32_t kAllLanes = 0xffffffff;

// x, which is the same number in all lanes; now the compiler knows that, lets the warp branch on it as one
// and can keep it in a uniform register: this instruction writes there.
FLASH_DEVICE int uniform(int x) { return __reduce_min_sync(kAllLanes, x); }

// x, of which the compiler is told nothing: what is computed from it is computed here, neither before a loop
// nor kept from earlier. Costs no instruction; saves registers where none is left.
template <typename Int>
FLASH_DEVICE Int computed_here(Int x) {
    asm volatile("" : "+r"(x));
    return x;
}
FLASH_DEVICE float computed_here(float x) {
    asm volatile("" : "+f"(x));
    return x;
}

// Neither loads nor products are moved past this place: `size` is not negative, but the compiler cannot know,
// and a branch ends the stretch of code within which ptxas orders instructions as it sees fit. `place`, 0 and
// up, is another number in each place, or one branch would answer for all.
FLASH_DEVICE void divide_schedule(int size, int place) {
    if (computed_here(size) == -1 - place) asm volatile("trap;");
}

// ---------------------------------------------------------------- global memory
// One or four words, at a multiple of their size, here and not later. Not by the path of constants: the
// kernel before may have written them while this one was set up.
template <int n>
FLASH_DEVICE void load_words(uint32_t *to, const void *from) {
    static_assert(n == 1 || n == 4);
    if constexpr (n == 1) {
        asm volatile("ld.global.b32 %0, [%1];" : "=r"(to[0]) : "l"(from));
    } else {
        asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "l"(from));
    }
}

// A word, where there is an address: else `to` stays. Several of these are on their way at once, which a
// condition in C++ would not allow. kPastL1: not from the L1 cache, which may hold what it held before a
// kernel that has ended meanwhile.
template <bool kPastL1>
FLASH_DEVICE void load_word_if(int &to, const int *from) {
    if constexpr (kPastL1) {
        asm volatile(
            "{\n"
            ".reg .pred is_there;\n"
            "setp.ne.u64 is_there, %1, 0;\n"
            "@is_there ld.global.cg.b32 %0, [%1];\n"
            "}"
            : "+r"(to)
            : "l"(from));
    } else {
        asm volatile(
            "{\n"
            ".reg .pred is_there;\n"
            "setp.ne.u64 is_there, %1, 0;\n"
            "@is_there ld.global.b32 %0, [%1];\n"
            "}"
            : "+r"(to)
            : "l"(from));
    }
}

// The line of an address, into the second level cache.
FLASH_DEVICE void prefetch_L2(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// ---------------------------------------------------------------- kernels of one stream
// From sm_90 on a kernel that is launched with cudaLaunchAttributeProgrammaticStreamSerialization need not
// wait for the end of the one before it to be set up.

// Thread blocks of the next kernel may take the room that this one's leave, once all of its blocks have
// called this, one thread each, or have ended.
FLASH_DEVICE void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Returns when the kernel before this one has ended and what it wrote is visible. To be called by every
// thread of the next kernel before it touches global memory, or ends.
FLASH_DEVICE void wait_for_prerequisites() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---------------------------------------------------------------- global <-> shared

// 16 bytes, past the L1 cache. A chunk that is not `in_bounds` is filled with zeros; nothing is read.
FLASH_DEVICE void cp_async(uint32_t smem, const void *gmem, bool in_bounds) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem),
                 "r"(in_bounds ? kChunkBytes : 0));
}

FLASH_DEVICE void cp_async(uint32_t smem, const void *gmem) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem), "l"(gmem));
}

// 4 bytes, through the L1 cache, the only way for so few; zeros where it is not `in_bounds`.
FLASH_DEVICE void cp_async_number(uint32_t smem, const void *gmem, bool in_bounds) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem), "l"(gmem),
                 "r"(in_bounds ? 4 : 0));
}

// Waits for all copies that this thread has started; other threads see them after a barrier.
FLASH_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Makes a group of the copies that this thread has started since the last group; it may be empty.
FLASH_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread but the youngest kPending.
template <int kPending>
FLASH_DEVICE void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

struct Chunk {
    uint32_t reg[4];  // 8 elements
};

FLASH_DEVICE Chunk load_global(const void *gmem) {
    Chunk c;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.reg[0]), "=r"(c.reg[1]), "=r"(c.reg[2]), "=r"(c.reg[3])
                 : "l"(gmem));
    return c;
}

// A streaming store: the line is not kept in L1, nothing reads it again.
FLASH_DEVICE void store_global(void *gmem, const Chunk &c) {
    asm volatile("st.global.L1::no_allocate.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(gmem), "r"(c.reg[0]),
                 "r"(c.reg[1]), "r"(c.reg[2]), "r"(c.reg[3])
                 : "memory");
}

FLASH_DEVICE Chunk load_shared(uint32_t smem) {
    Chunk c;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.reg[0]), "=r"(c.reg[1]), "=r"(c.reg[2]), "=r"(c.reg[3])
                 : "r"(smem)
                 : "memory");
    return c;
}

FLASH_DEVICE void store_shared(uint32_t smem, const Chunk &c) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(c.reg[0]), "r"(c.reg[1]),
                 "r"(c.reg[2]), "r"(c.reg[3])
                 : "memory");
}

FLASH_DEVICE void store_shared(uint32_t smem, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem), "r"(value) : "memory");
}

FLASH_DEVICE uint32_t load_shared_word(uint32_t smem) {
    uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(smem) : "memory");
    return value;
}

FLASH_DEVICE float2 load_shared_float2(uint32_t smem) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(smem) : "memory");
    return value;
}

FLASH_DEVICE void store_shared(uint32_t smem, int4 value) {
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}

FLASH_DEVICE int4 load_shared_int4(uint32_t smem) {
    int4 value;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(smem)
                 : "memory");
    return value;
}

FLASH_DEVICE void store_shared(uint32_t smem, float4 value) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "f"(value.x), "f"(value.y),
                 "f"(value.z), "f"(value.w)
                 : "memory");
}

FLASH_DEVICE float4 load_shared_float4(uint32_t smem) {
    float4 value;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(smem)
                 : "memory");
    return value;
}

FLASH_DEVICE int load_shared_int(uint32_t smem) {
    int value;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(smem) : "memory");
    return value;
}

// ---------------------------------------------------------------- named barriers

// Waits until `n_threads` threads have come to barrier `id`, 1 to 15; their writes to shared memory are seen.
FLASH_DEVICE void named_barrier_sync(int id, int n_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

// Counts as having come to the barrier, without waiting there.
FLASH_DEVICE void named_barrier_arrive(int id, int n_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

// ---------------------------------------------------------------- mbarrier
// A barrier in shared memory, 8 bytes, that does not make those who arrive wait: a phase completes with
// its last arrival, and whoever needs it waits for the phase's parity.

FLASH_DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Its memory may hold another one then.
FLASH_DEVICE void mbarrier_invalidate(uint32_t barrier) {
    asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

FLASH_DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

// How a warp that is done reports it: one lane arrives for all, which have come together before. NVIDIA's
// racecheck does not see that; for it kernels are compiled with FLASH_EVERY_LANE_ARRIVES, and each lane does.
#ifdef FLASH_EVERY_LANE_ARRIVES
inline constexpr bool kEveryLaneArrives = true;
#else
inline constexpr bool kEveryLaneArrives = false;
#endif
inline constexpr int kArrivalsOfWarp = kEveryLaneArrives ? kWarpSize : 1;

FLASH_DEVICE bool arrives_for_warp(int lane) { return kEveryLaneArrives || lane == 0; }

// This thread's arrival, which takes place when all copies that it has started are complete.
FLASH_DEVICE void mbarrier_arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of `parity` is complete. sm_90 lets the thread sleep meanwhile.
FLASH_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred done; wait_%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra wait_%=; "
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#else
    asm volatile(
        "{ .reg .pred done; wait_%=: mbarrier.test_wait.parity.shared.b64 done, [%0], %1; @!done bra "
        "wait_%=; "
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// ---------------------------------------------------------------- shared -> fragments

// a ^ b, computed where it stands. The compiler would rather compute every address once before a loop
// and keep it, in kernels that have no register left for that.
FLASH_DEVICE uint32_t xor_in_place(uint32_t a, uint32_t b) {
    uint32_t result;
    asm volatile("xor.b32 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// Four 8 x 8 squares; `smem`: the address of this lane's row (fragments.cuh).
FLASH_DEVICE void ldmatrix(uint32_t (&reg)[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(reg[0]), "=r"(reg[1]), "=r"(reg[2]), "=r"(reg[3])
                 : "r"(smem));
}

FLASH_DEVICE void ldmatrix_transposed(uint32_t (&reg)[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(reg[0]), "=r"(reg[1]), "=r"(reg[2]), "=r"(reg[3])
                 : "r"(smem));
}

// A square of 8 x 8 elements, of which lane l holds row l / 4, columns 2 (l % 4) and + 1, transposed.
FLASH_DEVICE uint32_t transpose_square(uint32_t word) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
    return transposed;
}

// ---------------------------------------------------------------- arithmetic

// c (16 x 8, fp32) += a (16 x 16) * b (16 x 8)
template <DType kDType>
FLASH_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kDType == DType::FP16) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
            "%9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Rounds two floats to the element type, to nearest even; `low` goes to the lower 16 bits.
template <DType kDType>
FLASH_DEVICE uint32_t pack(float low, float high) {
    uint32_t packed;
    if constexpr (kDType == DType::FP16) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
}

// The same; what is below 0 becomes 0. NaN stays NaN.
template <DType kDType>
FLASH_DEVICE uint32_t pack_positive(float low, float high) {
    uint32_t packed;
    if constexpr (kDType == DType::FP16) {
        asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
}

// To FP16; what is larger than its largest number, 65504, becomes that. NaN stays NaN.
FLASH_DEVICE uint32_t pack_finite(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// 2^x by the special function unit: relative error below 2^-22; 2^-inf = 0, NaN stays NaN.
FLASH_DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x within 1 ulp; 1 / 0 = inf.
FLASH_DEVICE float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace flash
