// What a tensor map says of a tensor: sizes and strides of its dimensions. Plain arithmetic, without CUDA.
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
// no memory need be. Copies of boxes of which no row, or no column, exists made illegal accesses on an H100,
// where nothing was mapped before the tensor: every box must have one (tests/gpu/test_unmapped.py).
#pragma once

#include <algorithm>
#include <cstdint>

#include "flash_attention.cuh"

namespace flash::tma {

// A (batch, seq, heads, d) tensor of 16-bit elements, seen through boxes of (box_rows, 64).
struct TensorView {
    const void *base;
    int64_t d, seq, heads, batch;
    TensorStrides strides;  // elements
    int box_rows;
    DType dtype;
    int64_t last_end = kNotRagged;  // ragged: the largest end of a sequence
    int group = 0;  // ragged, batch of 1: so many neighbouring heads are the rows of one; 0: they are not
    int promotion = 128;  // bytes that come to the L2 cache at a time: 128 or 256

    static constexpr int64_t kNotRagged = -1;

    bool operator==(const TensorView &other) const {
        return base == other.base && d == other.d && seq == other.seq && heads == other.heads &&
               batch == other.batch && strides.batch == other.strides.batch &&
               strides.seq == other.strides.seq && strides.head == other.strides.head &&
               box_rows == other.box_rows && dtype == other.dtype && last_end == other.last_end &&
               group == other.group && promotion == other.promotion;
    }
};

// A stride that the hardware takes: a dimension of size 1 is never stepped along, whatever its stride says.
inline uint64_t stride_bytes(int64_t stride, int64_t size, int64_t d) {
    constexpr int64_t kAlignment = 16;
    return size == 1 ? (d * 2 + kAlignment - 1) / kAlignment * kAlignment : stride * 2;
}

// Dimensions: column, row, [end of the sequence,] head, batch; the stride of the first is one element. Of
// groups: column, head of the group, row, end of the sequence, group.
struct MapShape {
    uintptr_t base;  // 0: a ragged map has no address for it
    int rank;
    uint64_t sizes[5];
    uint64_t strides[4];  // bytes, of the second dimension and on
};

inline MapShape map_shape(const TensorView &view) {
    const bool ragged = view.last_end != TensorView::kNotRagged;
    // Rows are stepped along by either dimension: of packed sequences of one row each, by the ends alone.
    const uint64_t row = stride_bytes(view.strides.seq, std::max(view.seq, view.last_end), view.d);
    MapShape shape{reinterpret_cast<uintptr_t>(view.base), 2, {uint64_t(view.d), uint64_t(view.seq)}, {row}};
    if (ragged) {
        const uint64_t shift = uint64_t(view.seq) * row;
        shape.base = shift < shape.base ? shape.base - shift : 0;
        shape.sizes[shape.rank] = uint64_t(view.last_end) + 1;
        shape.strides[shape.rank++ - 1] = row;
    }
    if (view.group > 0) {
        const uint64_t head = stride_bytes(view.strides.head, view.heads * view.group, view.d);
        return {shape.base,
                5,
                {uint64_t(view.d), uint64_t(view.group), uint64_t(view.seq), uint64_t(view.last_end) + 1,
                 uint64_t(view.heads)},
                {head, row, row, head * view.group}};
    }
    shape.sizes[shape.rank] = uint64_t(view.heads);
    shape.strides[shape.rank++ - 1] = stride_bytes(view.strides.head, view.heads, view.d);
    shape.sizes[shape.rank] = uint64_t(view.batch);
    shape.strides[shape.rank++ - 1] = stride_bytes(view.strides.batch, view.batch, view.d);
    return shape;
}

}  // namespace flash::tma
