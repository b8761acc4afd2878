// The SMs of the current device: persistent blocks are as many.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>

#include "common/scheduler_counters.cuh"

namespace flash {

inline cudaError_t sm_count(int &count) {
    static std::array<std::atomic<int>, kMaxDevices> counts{};  // 0: not asked yet
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    if (device >= kMaxDevices) return cudaErrorInvalidDevice;
    count = counts[device].load(std::memory_order_relaxed);
    if (count != 0) return cudaSuccess;
    const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) counts[device].store(count, std::memory_order_relaxed);
    return error;
}

}  // namespace flash
