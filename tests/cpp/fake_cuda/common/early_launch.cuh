// In the place of launches: host tests launch nothing, but templates that do are read.
#pragma once

#include <cuda_runtime.h>

using cudaStream_t = void *;
inline constexpr cudaError_t cudaErrorInvalidConfiguration = cudaErrorInvalidValue;
cudaError_t cudaGetLastError();

namespace flash {

template <bool kEarly>
cudaError_t launch_kernel(const void *kernel, unsigned n_blocks, int n_threads, int smem_bytes,
                          cudaStream_t stream, void **parameters);

}  // namespace flash
