// Tensor maps: what a bulk tensor copy must know of a tensor in global memory.
//
// They are encoded by the driver, whose entry point is looked up at run time, so that nothing links to
// libcuda. Encoding is pure host work; the last maps of each thread are kept, since most calls pass tensors
// at addresses they have passed before. What they say of a tensor is in tensor_view.cuh.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "common/swizzling.cuh"
#include "tma/tensor_view.cuh"

namespace flash::tma {

using EncodeTiled = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                 const cuuint64_t *, const cuuint32_t *, const cuuint32_t *,
                                 CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill);

// The driver's cuTensorMapEncodeTiled, or nullptr where the driver is older than CUDA 12.0.
inline EncodeTiled encode_tiled() {
    static const EncodeTiled function = [] {
        void *address = nullptr;
        cudaDriverEntryPointQueryResult status;
        const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000,
                                                                   cudaEnableDefault, &status);
        const bool found = error == cudaSuccess && status == cudaDriverEntryPointSuccess;
        return found ? reinterpret_cast<EncodeTiled>(address) : nullptr;
    }();
    return function;
}

// The driver encodes only in a thread that has a context. One that has run nothing on its device has none,
// such as autograd's before its first kernel or allocation.
inline bool gives_thread_a_context() {
    int device = 0;
    return cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
}

// Refuses (cudaErrorInvalidValue) what a tensor map cannot say: an address or a stride that is not a multiple
// of 16 bytes, a negative stride, one of 2^40 bytes or more.
inline cudaError_t encode(const TensorView &view, CUtensorMap &map) {
    const EncodeTiled function = encode_tiled();
    if (function == nullptr) return cudaErrorInsufficientDriver;
    const MapShape shape = map_shape(view);
    if (shape.base == 0) return cudaErrorInvalidValue;
    const cuuint32_t rows = static_cast<cuuint32_t>(view.box_rows);
    const cuuint32_t group = static_cast<cuuint32_t>(view.group);
    const cuuint32_t box[5] = {kPanelColumns, group > 0 ? group : rows, group > 0 ? rows : 1, 1, 1};
    const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
    cuuint64_t sizes[5], strides[4];
    std::copy_n(shape.sizes, 5, sizes);
    std::copy_n(shape.strides, 4, strides);
    const auto type =
        view.dtype == DType::BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const auto promotion =
        view.promotion > 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
    const auto is_encoded = [&] {
        return function(&map, type, shape.rank, reinterpret_cast<void *>(shape.base), sizes, strides, box,
                        element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
    };
    return is_encoded() || (gives_thread_a_context() && is_encoded()) ? cudaSuccess : cudaErrorInvalidValue;
}

// The encoded map of a view, from this thread's cache where it is there.
inline cudaError_t find_or_encode(const TensorView &view, CUtensorMap &map) {
    struct Entry {
        TensorView view;
        CUtensorMap map;
    };
    constexpr int kEntries = 64;
    static thread_local std::array<Entry, kEntries> entries{};

    uint64_t hash = reinterpret_cast<uintptr_t>(view.base) >> 4;
    for (const int64_t part : {view.seq, view.heads, view.strides.seq, view.strides.head,
                               int64_t{view.box_rows + view.promotion}}) {
        hash = (hash ^ static_cast<uint64_t>(part)) * 0x9E3779B97F4A7C15ull;
    }
    Entry &entry = entries[hash >> 58];
    static_assert(kEntries == 1 << (64 - 58));
    if (!(entry.view == view)) {
        entry.view = TensorView{};  // no match, should encoding fail
        if (const cudaError_t error = encode(view, entry.map); error != cudaSuccess) return error;
        entry.view = view;
    }
    map = entry.map;
    return cudaSuccess;
}

}  // namespace flash::tma
