// As much of CUDA's runtime as tma/tensor_map.cuh names; the test that includes it defines the functions.
#pragma once

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInsufficientDriver = 35 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0 };
inline constexpr unsigned long long cudaEnableDefault = 0;

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult *found);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
