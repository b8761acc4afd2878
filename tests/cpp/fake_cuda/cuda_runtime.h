// As much of CUDA's runtime as host code names. Tests that call a function define it, or take
// launch_rules.hpp.
#pragma once

#include <cstddef>

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInsufficientDriver = 35,
    cudaErrorInvalidDevice = 101,
    cudaErrorNotSupported = 801,
};
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0 };
inline constexpr unsigned long long cudaEnableDefault = 0;

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult *found);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetLastError();
const char *cudaGetErrorString(cudaError_t error);

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);

// ---------------------------------------------------------------- kernels
struct dim3 {
    unsigned x, y = 1, z = 1;
    dim3(unsigned size = 1) : x(size) {}
};
using cudaStream_t = struct CUstream_st *;
enum cudaLaunchAttributeID {
    cudaLaunchAttributeClusterDimension,
    cudaLaunchAttributeProgrammaticStreamSerialization,
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        struct {
            unsigned x, y, z;
        } clusterDim;
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **parameters, size_t smem_bytes,
                             cudaStream_t stream);
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **parameters);

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaFuncAttributes {
    int numRegs, maxThreadsPerBlock;
    size_t localSizeBytes, sharedSizeBytes;
};
cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int n_threads,
                                                          size_t smem_bytes);

// ---------------------------------------------------------------- memory, streams, graphs
cudaError_t cudaMalloc(void **memory, size_t bytes);
template <typename T>
cudaError_t cudaMalloc(T **memory, size_t bytes) {
    return cudaMalloc(reinterpret_cast<void **>(memory), bytes);
}
cudaError_t cudaMemset(void *memory, int value, size_t bytes);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id);

#define CUDART_CB
#define CUDART_VERSION 13000
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
using cudaGraph_t = struct CUgraph_st *;
using cudaUserObject_t = struct CUuserObject_st *;
inline constexpr unsigned cudaUserObjectNoDestructorSync = 1, cudaGraphUserObjectMove = 1;
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph, const void *dependencies,
                                     const void *edges, size_t *n_dependencies);
cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *argument, void (*destroy)(void *),
                                 unsigned references, unsigned flags);
cudaError_t cudaUserObjectRelease(cudaUserObject_t object);
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned references,
                                      unsigned flags);
