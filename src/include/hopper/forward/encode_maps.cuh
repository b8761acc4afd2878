// The tensor maps of one launch: what each of them says of its tensor, for packed sequences, pages and heads
// that are narrower than the kernel's.
#pragma once

#include <numeric>

#include "common/planned_work.cuh"
#include "flash_attention.cuh"
#include "hopper/forward/static_kernel_configuration.cuh"
#include "hopper/forward/streamed_view.cuh"
#include "tma/tensor_map.cuh"

namespace flash::hopper {

using namespace flash::tma;

struct EncodedMaps {
    CUtensorMap q, k, v, o, streamed;
};

template <typename Kernel>
cudaError_t encode_maps(const ForwardProblem &p, EncodedMaps &maps) {
    // The tensors' own head sizes: what lacks to the kernel's arrives as zeros.
    const int d_head = Kernel::traits.padded_head ? p.d_head : Kernel::d_head;
    const int d_head_v = Kernel::traits.padded_head ? p.d_head_v : Kernel::d_head_v;
    // Packed sequences end anywhere in the tensor, others at most where the batch item does.
    const auto last_end = [](const int *cu_seqlens, int64_t total, int seq_len) {
        return !Kernel::traits.varlen ? TensorView::kNotRagged : cu_seqlens != nullptr ? total : seq_len;
    };
    const auto queries = [&](const void *base, int d, const TensorStrides &strides, int box_rows) {
        const int batch = Kernel::traits.varlen && p.cu_seqlens_q != nullptr ? 1 : p.batch;
        if constexpr (Kernel::traits.planned) {  // heads of a group are rows of one query
            const int group = heads_as_rows(p.n_heads / p.n_heads_kv, box_rows);
            return TensorView{base,      d,       p.seq_len_q,      p.n_heads / group,
                              1,         strides, box_rows / group, Kernel::dtype,
                              p.total_q, group};
        }
        return TensorView{base,
                          d,
                          p.seq_len_q,
                          p.n_heads,
                          batch,
                          strides,
                          box_rows,
                          Kernel::dtype,
                          last_end(p.cu_seqlens_q, p.total_q, p.seq_len_q)};
    };
    const auto keys = [&](const void *base, int d, const TensorStrides &strides, int box_rows) {
        if constexpr (Kernel::traits.paged) {  // a page is a sequence, the end of which is that of its keys
            return TensorView{base,
                              d,
                              p.page_size,
                              p.n_heads_kv,
                              p.n_pages,
                              strides,
                              std::gcd(p.page_size, box_rows),
                              Kernel::dtype,
                              p.page_size};
        }
        const int batch = Kernel::traits.varlen && p.cu_seqlens_k != nullptr ? 1 : p.batch;
        return TensorView{base,
                          d,
                          p.seq_len_k,
                          p.n_heads_kv,
                          batch,
                          strides,
                          box_rows,
                          Kernel::dtype,
                          last_end(p.cu_seqlens_k, p.total_k, p.seq_len_k)};
    };
    cudaError_t error = find_or_encode(queries(p.q, d_head, p.q_strides, Kernel::B_r), maps.q);
    if (error != cudaSuccess) return error;
    if (p.seq_len_k > 0) {  // else no item has a tile
        error = find_or_encode(keys(p.k, d_head, p.k_strides, Kernel::kv_box_rows(Kernel::d_head)), maps.k);
        if (error != cudaSuccess) return error;
        error =
            find_or_encode(keys(p.v, d_head_v, p.v_strides, Kernel::kv_box_rows(Kernel::d_head_v)), maps.v);
        if (error != cudaSuccess) return error;
    }
    if (Kernel::direct_store) return error;
    // Each warpgroup's 64 rows are stored by themselves.
    return find_or_encode(queries(p.o, d_head_v, p.o_strides, kWarpgroupRows), maps.o);
}

// Of what a mod streams. False: copies cannot bring it.
template <typename Kernel>
bool encode_streamed(const ForwardProblem &p, EncodedMaps &maps) {
    TensorView view{};
    return p.mod != nullptr && view_streamed<typename Kernel::Mod>(*p.mod, view) &&
           find_or_encode(view, maps.streamed) == cudaSuccess;
}

}  // namespace flash::hopper
