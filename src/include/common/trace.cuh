// When thread blocks get where: for benchmarks/trace_decode.py, which compiles kernels with -DFLASH_TRACE.
// Without it a stamp is nothing.
//
// The first thread of a block notes the nanoseconds of the GPU's clock, and the cycles of the SM's, which are
// finer. The notes lie in the kernel library, which holds one kernel then, and are read through it.
#pragma once

#include "common/cuda_utils.cuh"

namespace flash {

// The kernel of the parts, and the one that combines them.
enum class TracedKernel { PARTS, COMBINE };

enum class TraceEvent {
    BEGIN,
    MAY_READ,      // the kernel before has ended
    LOADS_ISSUED,  // as many as there is room for
    FIRST_TILE,    // its keys have arrived; of COMBINE: the weights of the parts are known
    LAST_TILE,     // keys and values have arrived
    COMPUTED,
    STORED,
};

#if defined(FLASH_TRACE)

inline constexpr int kTracedKernels = 2, kTracedBlocks = 4096, kTraceEvents = 7;

struct TraceStamp {
    unsigned long long nanoseconds, cycles;
};
struct TraceNotes {
    TraceStamp stamps[kTracedKernels][kTracedBlocks][kTraceEvents];
    unsigned sm[kTracedKernels][kTracedBlocks];
    TraceStamp mark;  // of a kernel before: older stamps are of other calls
};
static __device__ TraceNotes trace_notes;

FLASH_DEVICE TraceStamp present_time() {
    TraceStamp now;
    asm volatile("mov.u64 %0, %%globaltimer;\n\tmov.u64 %1, %%clock64;"
                 : "=l"(now.nanoseconds), "=l"(now.cycles)::"memory");
    return now;
}

FLASH_DEVICE void stamp(TracedKernel kernel, TraceEvent event) {
    if (threadIdx.x != 0 || blockIdx.x >= kTracedBlocks) return;
    const int of = static_cast<int>(kernel);
    trace_notes.stamps[of][blockIdx.x][static_cast<int>(event)] = present_time();
    if (event == TraceEvent::BEGIN) {
        unsigned sm;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        trace_notes.sm[of][blockIdx.x] = sm;
    }
}

static __global__ void mark_trace() { trace_notes.mark = present_time(); }

#define FLASH_TRACE_FUNCTION extern "C" __attribute__((visibility("default"), used)) inline
FLASH_TRACE_FUNCTION int flash_trace_bytes() { return sizeof(TraceNotes); }
FLASH_TRACE_FUNCTION int flash_trace_read(void *to) {
    return cudaMemcpyFromSymbol(to, trace_notes, sizeof(TraceNotes));
}
FLASH_TRACE_FUNCTION int flash_trace_mark(void *stream) {
    mark_trace<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>();
    return cudaGetLastError();
}

#else
FLASH_DEVICE void stamp(TracedKernel, TraceEvent) {}
#endif

}  // namespace flash
