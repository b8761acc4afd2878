// The captured tensor whose rows a mod streams, as bulk copies see it (tma/tensor_view.cuh): keys are
// columns, queries rows; up to two other dimensions, in the places of heads and batch items, have coordinates
// of their own (Mod::streamed_place).
#pragma once

#include <type_traits>

#include "common/mod_values.cuh"
#include "hopper/layout.cuh"
#include "mod_arguments.cuh"
#include "tma/tensor_view.cuh"

namespace flash::hopper {

// False: copies do not take a tensor that lies like this.
template <typename Mod>
bool view_streamed(const ModArguments &given, tma::TensorView &view) {
    constexpr mods::StreamedTensor kTensor = Mod::kStreamedTensor;
    using Element = typename decltype(Mod::streamed_row(typename Mod::Row{}))::Element;
    const CapturedTensor &tensor = given.tensors[kTensor.number];
    constexpr int kKeyAxis = kTensor.n_dims - 1;
    if (tensor.strides[kKeyAxis] != 1 || reinterpret_cast<uintptr_t>(tensor.data) % 16 != 0) return false;
    int64_t sizes[2] = {1, 1}, strides[2] = {0, 0};  // of other dimensions: batch, head
    for (int axis = kKeyAxis - 1, outer = 1; axis >= 0; --axis) {
        const int64_t stride = tensor.sizes[axis] == 1 ? 0 : tensor.strides[axis];
        if (tensor.sizes[axis] == 0 || stride < 0 || stride % 8 != 0) return false;
        if (axis == kTensor.query_axis) continue;
        sizes[outer] = stride == 0 ? 1 : tensor.sizes[axis];
        strides[outer--] = stride;
    }
    const int64_t step = tensor.strides[kTensor.query_axis];
    if (tensor.sizes[kKeyAxis] == 0 || (step == 0 && tensor.sizes[kTensor.query_axis] > 1)) return false;
    view = tma::TensorView{tensor.data,
                           tensor.sizes[kKeyAxis],
                           tensor.sizes[kTensor.query_axis],
                           sizes[1],
                           sizes[0],
                           {strides[0], step, strides[1]},
                           kWarpgroupRows,
                           std::is_same_v<Element, mods::Bf16> ? DType::BF16 : DType::FP16};
    return true;
}

}  // namespace flash::hopper
