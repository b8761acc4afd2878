// Tensor maps: what a bulk tensor copy must know of a tensor in global memory.
//
// They are encoded by the driver, whose entry point is looked up at run time, so that nothing links to
// libcuda. Encoding is pure host work; the last maps of each thread are kept, since most calls pass tensors
// at addresses they have passed before.
//
// Sequences of different lengths. A box that runs past its sequence's end must arrive as zeros there (the
// next sequence's V may hold NaN, and 0 * NaN is NaN), and must not be stored there. The hardware compares
// coordinates with sizes that are the same for the whole tensor; so a ragged map has its rows twice, in
// dimensions of the same stride, and its base `seq` rows before the tensor:
//
//     row r of the box, at (row, end):  address = tensor + (row + r + end - seq) * stride,  there if row + r
//     < seq
//
// With row = seq - (end - first), this is row first + r of the tensor, there if first + r < end.
//
// The size of the `end` dimension is the largest end and one, so that the map's last element is the tensor's:
// whatever the offsets on the device say, nothing behind it is read. The base lies before the tensor, where
// no memory need be; copies touch it where no row of a box exists, so that every box must have one (a paged
// kernel on an H100 made an illegal access there).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "flash_attention.cuh"
#include "hopper/layout.cuh"

namespace flash::hopper {

// A (batch, seq, heads, d) tensor of 16-bit elements, seen through boxes of (box_rows, 64).
struct TensorView {
    const void *base;
    int64_t d, seq, heads, batch;
    TensorStrides strides;  // elements
    int box_rows;
    DType dtype;
    int64_t last_end = kNotRagged;  // ragged: the largest end of a sequence

    static constexpr int64_t kNotRagged = -1;

    bool operator==(const TensorView &other) const {
        return base == other.base && d == other.d && seq == other.seq && heads == other.heads &&
               batch == other.batch && strides.batch == other.strides.batch &&
               strides.seq == other.strides.seq && strides.head == other.strides.head &&
               box_rows == other.box_rows && dtype == other.dtype && last_end == other.last_end;
    }
};

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

// A stride that the hardware takes: a dimension of size 1 is never stepped along, whatever its stride says.
inline cuuint64_t stride_bytes(int64_t stride, int64_t size, int64_t d) {
    constexpr int64_t kAlignment = 16;
    return size == 1 ? (d * 2 + kAlignment - 1) / kAlignment * kAlignment : stride * 2;
}

// Refuses (cudaErrorInvalidValue) what a tensor map cannot say: an address or a stride that is not a multiple
// of 16 bytes, a negative stride, one of 2^40 bytes or more.
inline cudaError_t encode(const TensorView &view, CUtensorMap &map) {
    const EncodeTiled function = encode_tiled();
    if (function == nullptr) return cudaErrorInsufficientDriver;
    const cuuint64_t seq_stride = stride_bytes(view.strides.seq, view.seq, view.d);
    // Column, row, [end of the sequence,] head, batch.
    cuuint64_t sizes[5] = {cuuint64_t(view.d), cuuint64_t(view.seq)};
    cuuint64_t strides[4] = {seq_stride};
    const cuuint32_t box[5] = {kPanelColumns, cuuint32_t(view.box_rows), 1, 1, 1};
    const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
    auto base = reinterpret_cast<uintptr_t>(view.base);
    int rank = 2;
    if (view.last_end != TensorView::kNotRagged) {
        const cuuint64_t shift = cuuint64_t(view.seq) * seq_stride;
        if (shift >= base) return cudaErrorInvalidValue;
        base -= shift;
        sizes[rank] = cuuint64_t(view.last_end) + 1;
        strides[rank++ - 1] = seq_stride;
    }
    sizes[rank] = cuuint64_t(view.heads);
    strides[rank++ - 1] = stride_bytes(view.strides.head, view.heads, view.d);
    sizes[rank] = cuuint64_t(view.batch);
    strides[rank++ - 1] = stride_bytes(view.strides.batch, view.batch, view.d);
    const CUresult result = function(
        &map, view.dtype == DType::BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        rank, reinterpret_cast<void *>(base), sizes, strides, box, element_strides,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
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
    for (const int64_t part :
         {view.seq, view.heads, view.strides.seq, view.strides.head, int64_t{view.box_rows}}) {
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

}  // namespace flash::hopper
