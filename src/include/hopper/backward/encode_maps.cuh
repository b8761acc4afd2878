// The tensor maps of one launch: what each of them says of its tensor, for packed sequences and heads that
// are narrower than the kernel's.
#pragma once

#include "hopper/backward/static_kernel_configuration.cuh"
#include "tma/tensor_map.cuh"

namespace flash::hopper {

using namespace flash::tma;

struct EncodedBackwardMaps {
    CUtensorMap q, k, v, dout;
};

template <typename Kernel>
cudaError_t encode_backward_maps(const BackwardProblem &p, EncodedBackwardMaps &maps) {
    // The tensors' own head sizes: what lacks to the kernel's arrives as zeros.
    const int d_head = Kernel::traits.padded_head ? p.d_head : Kernel::d_head;
    const int d_head_v = Kernel::traits.padded_head ? p.d_head_v : Kernel::d_head_v;
    // Packed sequences end anywhere in the tensor, others at most where the batch item does.
    const auto view = [&](const void *base, int d, const TensorStrides &strides, int seq_len, int n_heads,
                          const int *cu_seqlens, int64_t total, int rows) {
        const bool packed = Kernel::traits.varlen && cu_seqlens != nullptr;
        const int64_t last_end = !Kernel::traits.varlen ? TensorView::kNotRagged : packed ? total : seq_len;
        TensorView view{base,    d,    seq_len,       n_heads, packed ? 1 : p.batch,
                        strides, rows, Kernel::dtype, last_end};
        view.promotion = 256;  // with which its times were measured
        return view;
    };
    const auto queries = [&](const void *base, int d, const TensorStrides &strides) {
        return view(base, d, strides, p.seq_len_q, p.n_heads, p.cu_seqlens_q, p.total_q, Kernel::B_r);
    };
    const auto keys = [&](const void *base, int d, const TensorStrides &strides) {
        return view(base, d, strides, p.seq_len_k, p.n_heads_kv, p.cu_seqlens_k, p.total_k, Kernel::B_c);
    };
    cudaError_t error = find_or_encode(queries(p.q, d_head, p.q_strides), maps.q);
    if (error == cudaSuccess) error = find_or_encode(queries(p.dout, d_head_v, p.dout_strides), maps.dout);
    if (error == cudaSuccess) error = find_or_encode(keys(p.k, d_head, p.k_strides), maps.k);
    if (error == cudaSuccess) error = find_or_encode(keys(p.v, d_head_v, p.v_strides), maps.v);
    return error;
}

}  // namespace flash::hopper
