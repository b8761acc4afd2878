// A CUDA runtime that launches nothing, and refuses what a GPU of compute capability 9.0 with 132
// multiprocessors would, by the limits of the CUDA C++ Programming Guide ("Compute Capabilities") and of
// cuTensorMapEncodeTiled in the driver API's reference. It keeps the first thing that it refused as a text.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <string>

inline constexpr size_t kMostParameterBytes = 4096;  // 32764 from compute capability 7.0 on, with CUDA 12.1
inline constexpr int kMultiprocessors = 132;

struct LaunchRules {
    static constexpr size_t kSmemUnasked = 48 << 10, kMostSmem = 227 << 10;
    inline static std::map<const void *, size_t> allowed_smem;
    inline static std::string refused;
    inline static int launches = 0, maps = 0;

    static cudaError_t refuse(const std::string &reason) {
        if (refused.empty()) refused = reason;
        return cudaErrorInvalidValue;
    }

    static bool check(bool right, const char *what, unsigned long long value) {
        if (!right) refuse(std::string(what) + " " + std::to_string(value));
        return right;
    }

    static cudaError_t launch(const void *kernel, const dim3 &grid, const dim3 &block, size_t smem_bytes,
                              void **parameters) {
        ++launches;
        const auto asked = allowed_smem.find(kernel);
        const size_t most_smem = asked == allowed_smem.end() ? kSmemUnasked : asked->second;
        const bool right = check(kernel != nullptr, "kernel", 0) &&
                           check(parameters != nullptr, "parameters", 0) &&
                           check(grid.x >= 1 && grid.x <= 0x7fffffff, "grid.x", grid.x) &&
                           check(grid.y >= 1 && grid.y <= 65535, "grid.y", grid.y) &&
                           check(grid.z >= 1 && grid.z <= 65535, "grid.z", grid.z) &&
                           check(block.x >= 1 && block.x <= 1024, "block.x", block.x) &&
                           check(block.y == 1 && block.z == 1, "block.y", block.y) &&
                           check(block.x % 32 == 0, "threads beside whole warps:", block.x) &&
                           check(smem_bytes <= most_smem, "dynamic shared memory", smem_bytes);
        return right ? cudaSuccess : cudaErrorInvalidValue;
    }

    // The driver's function, which gives its own codes.
    static CUresult encode(CUtensorMap *map, CUtensorMapDataType, cuuint32_t rank, void *address,
                           const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                           const cuuint32_t *element_strides, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
        ++maps;
        const auto base = reinterpret_cast<uintptr_t>(address);
        bool right = check(reinterpret_cast<uintptr_t>(map) % 64 == 0, "address of a tensor map", 0) &&
                     check(base % 16 == 0, "address of a tensor", base) &&
                     check(rank >= 1 && rank <= 5, "rank", rank) &&
                     check(box[0] * 2 <= 128, "bytes of a swizzled row of a box", box[0] * 2) &&
                     check(box[0] * 2 % 16 == 0, "bytes of a row of a box", box[0] * 2);
        for (unsigned i = 0; right && i < rank; ++i) {
            right = check(sizes[i] >= 1 && sizes[i] <= 1ull << 32, "size of a dimension", sizes[i]) &&
                    check(box[i] >= 1 && box[i] <= 256, "size of a box", box[i]) &&
                    check(element_strides[i] >= 1 && element_strides[i] <= 8, "stride of elements",
                          element_strides[i]);
        }
        for (unsigned i = 0; right && i + 1 < rank; ++i) {
            right = check(strides[i] % 16 == 0, "stride of a tensor", strides[i]) &&
                    check(strides[i] < 1ull << 40, "stride of a tensor", strides[i]);
        }
        return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
};

// ---------------------------------------------------------------- what the runtime offers
inline cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **parameters,
                                    size_t smem_bytes, cudaStream_t) {
    return LaunchRules::launch(kernel, grid, block, smem_bytes, parameters);
}
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel,
                                       void **parameters) {
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const cudaLaunchAttribute &attribute = config->attrs[i];
        if (attribute.id != cudaLaunchAttributeClusterDimension) continue;
        const auto &cluster = attribute.val.clusterDim;
        if (cluster.x * cluster.y * cluster.z < 1 || cluster.x * cluster.y * cluster.z > 8)
            return LaunchRules::refuse("size of a cluster");
        if (config->gridDim.x % cluster.x || config->gridDim.y % cluster.y || config->gridDim.z % cluster.z)
            return LaunchRules::refuse("blocks of an unfinished cluster " +
                                       std::to_string(config->gridDim.x));
    }
    return LaunchRules::launch(kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes,
                               parameters);
}
inline cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute, int bytes) {
    if (bytes < 0 || size_t(bytes) > LaunchRules::kMostSmem)
        return LaunchRules::refuse("shared memory of a block " + std::to_string(bytes));
    LaunchRules::allowed_smem[kernel] = bytes;
    return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
    *attributes = {};
    return cudaSuccess;
}
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int,
                                                                 size_t smem_bytes) {
    *blocks = static_cast<int>(LaunchRules::kMostSmem / (smem_bytes + 1024));
    return cudaSuccess;
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult *found) {
    *function = reinterpret_cast<void *>(&LaunchRules::encode);
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char *cudaGetErrorString(cudaError_t) {
    return LaunchRules::refused.empty() ? "the launcher refused it" : LaunchRules::refused.c_str();
}
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int) {
    *value = kMultiprocessors;
    return cudaSuccess;
}
inline cudaError_t cudaMalloc(void **memory, size_t bytes) {
    *memory = ::operator new(bytes);
    return cudaSuccess;
}
inline cudaError_t cudaMemset(void *, int, size_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) {
    *id = reinterpret_cast<uintptr_t>(stream);
    return cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
// Of captures, which there are none of.
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *, unsigned long long *,
                                            cudaGraph_t *, const void *, const void *, size_t *) {
    return cudaErrorNotSupported;
}
inline cudaError_t cudaUserObjectCreate(cudaUserObject_t *, void *, void (*)(void *), unsigned, unsigned) {
    return cudaErrorNotSupported;
}
inline cudaError_t cudaUserObjectRelease(cudaUserObject_t) { return cudaErrorNotSupported; }
inline cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
    return cudaErrorNotSupported;
}

// What the test asks for in the end.
extern "C" __attribute__((visibility("default"), weak)) int fake_cuda_launches() {
    return LaunchRules::launches;
}
