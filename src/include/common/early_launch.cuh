// A launch that does not wait for the end of the kernel before it in the stream: thread blocks are set up
// when those before them have left, or have called launch_dependents(), and wait in wait_for_prerequisites()
// (ptx.cuh). Every thread must call that before it touches global memory or ends: then whatever follows in
// the stream finds all of it done, whichever way it is launched. In a CUDA graph the launch has a
// programmatic dependency.
//
// One kernel reads before it waits: planned_combine.cuh reads lengths, which nobody writes meanwhile, for the
// kernel right before it has waited for those who did in every block. No launch may come between the two.
#pragma once

#include <cuda_runtime.h>

namespace flash {

// kEarly: only for kernels that wait, compiled for sm_90 or newer.
template <bool kEarly>
cudaError_t launch_kernel(const void *kernel, unsigned n_blocks, int n_threads, int smem_bytes,
                          cudaStream_t stream, void **parameters) {
    if constexpr (kEarly) {
        cudaLaunchAttribute early{};
        early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        early.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(n_blocks);
        config.blockDim = dim3(n_threads);
        config.dynamicSmemBytes = smem_bytes;
        config.stream = stream;
        config.attrs = &early;
        config.numAttrs = 1;
        return cudaLaunchKernelExC(&config, kernel, parameters);
    } else {
        return cudaLaunchKernel(kernel, dim3(n_blocks), dim3(n_threads), parameters, smem_bytes, stream);
    }
}

}  // namespace flash
