// Leaves NaN behind in the shared memory and the registers of every SM: for kernels that read what they have
// not written. All bits set are NaN in float32, FP16 and BF16.
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 1024;
constexpr int kRegisters = 48;  // of 64 a thread: the others hold addresses
constexpr int kWords = 16;      // a thread, of 99 KiB or more of shared memory
constexpr int kRounds = 4;      // blocks an SM gets on average: the hardware may give one SM two at once

__global__ void __launch_bounds__(kThreads, 1) fill_with_nan(int n_words) {
    extern __shared__ unsigned words[];
    for (int i = threadIdx.x; i < n_words; i += kThreads) words[i] = 0xffffffffu;
    __syncthreads();
    // Volatile accesses stay on their side of the barrier: all registers hold NaN at once.
    volatile unsigned *mine = words + threadIdx.x;
    unsigned registers[kRegisters];
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) registers[i] = mine[i % kWords * kThreads];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) mine[i % kWords * kThreads] = registers[i];
}

__global__ void count_other_words(int n_words, unsigned *count) {
    extern __shared__ unsigned words[];
    volatile unsigned *read = words;
    for (int i = threadIdx.x; i < n_words; i += blockDim.x) {
        if (read[i] != 0xffffffffu) atomicAdd(count, 1);
    }
}

template <typename Kernel>
cudaError_t all_shared_memory(Kernel kernel, int &n_sms, int &bytes) {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device);
    }
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace

// Queues the fill on a stream; a cudaError_t.
extern "C" int fill_shared_memory_with_nan(cudaStream_t stream) {
    int n_sms = 0, bytes = 0;
    const cudaError_t error = all_shared_memory(fill_with_nan, n_sms, bytes);
    if (error != cudaSuccess) return error;
    fill_with_nan<<<kRounds * n_sms, kThreads, bytes, stream>>>(bytes / 4);
    return cudaGetLastError();
}

// Adds to *count the words of all SMs' shared memory that hold something else.
extern "C" int count_other_shared_memory(unsigned *count, cudaStream_t stream) {
    int n_sms = 0, bytes = 0;
    const cudaError_t error = all_shared_memory(count_other_words, n_sms, bytes);
    if (error != cudaSuccess) return error;
    count_other_words<<<n_sms, kThreads, bytes, stream>>>(bytes / 4, count);
    return cudaGetLastError();
}
