// A plain backward pass, without tensor cores or shared memory: a thread owns a row of Q, or a key. It
// computes what every backward kernel computes, rounds where they round, and has the same bits in every run.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backward.cuh"
#include "common/sequence_rows.cuh"

namespace flash {

template <DType dtype>
using Element = std::conditional_t<dtype == DType::FP16, __half, __nv_bfloat16>;

template <typename T>
__device__ float rounded(float x) {
    return static_cast<float>(static_cast<T>(x));
}

__device__ inline int rows_of(int64_t total) { return total < INT32_MAX ? int(total) : INT32_MAX; }

// Which row of which sequence a row of a tensor is; index -1: of none.
struct PlaceOfRow {
    int item, index;
    SequenceRows queries, keys;
};

template <BackwardTraits TRAITS>
__device__ PlaceOfRow place_of(const BackwardProblem &p, int64_t row, bool of_keys) {
    const int *const offsets = of_keys ? p.cu_seqlens_k : p.cu_seqlens_q;
    const int longest = of_keys ? p.seq_len_k : p.seq_len_q;
    for (int item = 0; item < p.batch; ++item) {
        const auto queries = sequence_rows(p.cu_seqlens_q, TRAITS.varlen ? p.seqused_q : nullptr, p.seq_len_q,
                                           rows_of(p.total_q), item);
        const auto keys = sequence_rows(p.cu_seqlens_k, TRAITS.varlen ? p.seqused_k : nullptr, p.seq_len_k,
                                        rows_of(p.total_k), item);
        const auto &rows = of_keys ? keys : queries;
        const int64_t first = offsets != nullptr ? rows.first_row : int64_t(item) * longest;
        if (row >= first && row < first + rows.n_rows) return {item, int(row - first), queries, keys};
    }
    return {0, -1, {}, {}};
}

template <BackwardTraits TRAITS>
__device__ bool sees(const BackwardProblem &p, const PlaceOfRow &place, int query, int key) {
    const int64_t at = int64_t(query) + place.keys.n_rows - place.queries.n_rows;
    if (TRAITS.causal && key > at) return false;
    return !TRAITS.window || (key >= at - p.window_left && key <= at + p.window_right);
}

__device__ inline int64_t row_of(const TensorStrides &strides, const SequenceRows &rows, int index,
                                 int head) {
    return rows.batch * strides.batch + (int64_t(rows.first_row) + index) * strides.seq + head * strides.head;
}

__device__ inline int64_t lse_of(const BackwardProblem &p, const SequenceRows &rows, int index, int head) {
    return lse_begin(p.cu_seqlens_q != nullptr, rows, p.n_heads, head, p.seq_len_q, p.total_q) + index;
}

template <typename T>
__device__ float dot(const void *x, int64_t x_at, const void *y, int64_t y_at, int n) {
    float sum = 0;
    for (int i = 0; i < n; ++i) {
        sum += float(static_cast<const T *>(x)[x_at + i]) * float(static_cast<const T *>(y)[y_at + i]);
    }
    return sum;
}

// P and dS of one pair of a query and a key, rounded as products take them.
template <typename T, BackwardTraits TRAITS>
__device__ float2 p_and_ds(const BackwardProblem &p, const PlaceOfRow &place, int query, int key, int head) {
    const int kv_head = head / (p.n_heads / p.n_heads_kv);
    const int64_t at = lse_of(p, place.queries, query, head);
    float score = p.softmax_scale * dot<T>(p.q, row_of(p.q_strides, place.queries, query, head), p.k,
                                           row_of(p.k_strides, place.keys, key, kv_head), p.d_head);
    float slope = 1;
    if constexpr (TRAITS.softcap) {
        const float tanh = tanhf(score / p.softcap);
        score = p.softcap * tanh;
        slope = 1 - tanh * tanh;
    }
    const float prob = expf(score - p.lse[at]);
    const float dp = dot<T>(p.dout, row_of(p.dout_strides, place.queries, query, head), p.v,
                            row_of(p.v_strides, place.keys, key, kv_head), p.d_head_v);
    return {rounded<T>(prob), rounded<T>(prob * (dp - p.delta[at]) * slope)};
}

template <DType dtype, BackwardTraits TRAITS>
__global__ void plain_delta_kernel(const BackwardProblem p, int64_t n_rows) {
    using T = Element<dtype>;
    const int64_t id = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (id >= n_rows * p.n_heads) return;
    const int head = id % p.n_heads;
    const int64_t row = id / p.n_heads;
    const bool packed = p.cu_seqlens_q != nullptr;
    const int64_t at = packed ? head * p.total_q + row
                              : (row / p.seq_len_q * p.n_heads + head) * p.seq_len_q + row % p.seq_len_q;
    const auto place = place_of<TRAITS>(p, row, false);
    float delta = 0;
    if (place.index >= 0 && p.lse[at] != -INFINITY) {
        delta = dot<T>(p.o, row_of(p.o_strides, place.queries, place.index, head), p.dout,
                       row_of(p.dout_strides, place.queries, place.index, head), p.d_head_v);
        if (p.dlse != nullptr) delta -= p.dlse[at];
    }
    p.delta[at] = delta;
}

template <DType dtype, BackwardTraits TRAITS>
__global__ void plain_dq_kernel(const BackwardProblem p, int64_t n_rows) {
    using T = Element<dtype>;
    const int64_t id = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (id >= n_rows * p.n_heads) return;
    const int head = id % p.n_heads, kv_head = head / (p.n_heads / p.n_heads_kv);
    const int64_t row = id / p.n_heads;
    const auto place = place_of<TRAITS>(p, row, false);
    float sums[256] = {};
    if (place.index >= 0 && p.lse[lse_of(p, place.queries, place.index, head)] != -INFINITY) {
        for (int key = 0; key < place.keys.n_rows; ++key) {
            if (!sees<TRAITS>(p, place, place.index, key)) continue;
            const float ds = p_and_ds<T, TRAITS>(p, place, place.index, key, head).y;
            const T *const k = static_cast<const T *>(p.k) + row_of(p.k_strides, place.keys, key, kv_head);
            for (int i = 0; i < p.d_head; ++i) sums[i] += ds * float(k[i]);
        }
    }
    const int64_t batch = p.cu_seqlens_q != nullptr ? 0 : row / p.seq_len_q;
    const int64_t at = p.cu_seqlens_q != nullptr ? row : row % p.seq_len_q;
    T *const dq = static_cast<T *>(p.dq) + batch * p.dq_strides.batch + at * p.dq_strides.seq +
                  head * p.dq_strides.head;
    for (int i = 0; i < p.d_head; ++i) dq[i] = T(sums[i] * p.softmax_scale);
}

template <DType dtype, BackwardTraits TRAITS>
__global__ void plain_dkv_kernel(const BackwardProblem p, int64_t n_rows) {
    using T = Element<dtype>;
    const int64_t id = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (id >= n_rows * p.n_heads_kv) return;
    const int kv_head = id % p.n_heads_kv, group = p.n_heads / p.n_heads_kv;
    const int64_t row = id / p.n_heads_kv;
    const auto place = place_of<TRAITS>(p, row, true);
    float dk_sums[256] = {}, dv_sums[256] = {};
    for (int head = kv_head * group; place.index >= 0 && head < (kv_head + 1) * group; ++head) {
        for (int query = 0; query < place.queries.n_rows; ++query) {
            if (!sees<TRAITS>(p, place, query, place.index)) continue;
            if (p.lse[lse_of(p, place.queries, query, head)] == -INFINITY) continue;
            const float2 pair = p_and_ds<T, TRAITS>(p, place, query, place.index, head);
            const T *const q = static_cast<const T *>(p.q) + row_of(p.q_strides, place.queries, query, head);
            const T *const dout =
                static_cast<const T *>(p.dout) + row_of(p.dout_strides, place.queries, query, head);
            for (int i = 0; i < p.d_head; ++i) dk_sums[i] += pair.y * float(q[i]);
            for (int i = 0; i < p.d_head_v; ++i) dv_sums[i] += pair.x * float(dout[i]);
        }
    }
    const int64_t batch = p.cu_seqlens_k != nullptr ? 0 : row / p.seq_len_k;
    const int64_t at = p.cu_seqlens_k != nullptr ? row : row % p.seq_len_k;
    if (p.dk != nullptr) {
        T *const dk = static_cast<T *>(p.dk) + batch * p.dk_strides.batch + at * p.dk_strides.seq +
                      kv_head * p.dk_strides.head;
        for (int i = 0; i < p.d_head; ++i) dk[i] = T(dk_sums[i] * p.softmax_scale);
    }
    if (p.dv != nullptr) {
        T *const dv = static_cast<T *>(p.dv) + batch * p.dv_strides.batch + at * p.dv_strides.seq +
                      kv_head * p.dv_strides.head;
        for (int i = 0; i < p.d_head_v; ++i) dv[i] = T(dv_sums[i]);
    }
}

template <auto CFG, BackwardTraits TRAITS>
struct PlainBackwardLauncher {
    static constexpr int kThreads = 32 * CFG.n_warps;

    static int load() { return cudaSuccess; }

    static BackwardWorkspaces workspaces(const BackwardProblem &) { return {}; }

    static int launch(const BackwardProblem &p, void *stream) {
        const auto s = static_cast<cudaStream_t>(stream);
        const int64_t rows = p.cu_seqlens_q != nullptr ? p.total_q : int64_t(p.batch) * p.seq_len_q;
        const int64_t keys = p.cu_seqlens_k != nullptr ? p.total_k : int64_t(p.batch) * p.seq_len_k;
        const auto grid = [](int64_t threads) { return unsigned((threads + kThreads - 1) / kThreads); };
        if (rows * p.n_heads > 0) {
            plain_delta_kernel<CFG.dtype, TRAITS><<<grid(rows * p.n_heads), kThreads, 0, s>>>(p, rows);
            if (p.dq != nullptr) {
                plain_dq_kernel<CFG.dtype, TRAITS><<<grid(rows * p.n_heads), kThreads, 0, s>>>(p, rows);
            }
        }
        if (keys * p.n_heads_kv > 0 && (p.dk != nullptr || p.dv != nullptr)) {
            plain_dkv_kernel<CFG.dtype, TRAITS><<<grid(keys * p.n_heads_kv), kThreads, 0, s>>>(p, keys);
        }
        return cudaGetLastError();
    }

    static int attributes(KernelAttributes &out) {
        cudaFuncAttributes a;
        const auto kernel = &plain_dkv_kernel<CFG.dtype, TRAITS>;
        if (const cudaError_t error = cudaFuncGetAttributes(&a, kernel)) return error;
        out = {.registers = a.numRegs,
               .local_bytes = static_cast<int>(a.localSizeBytes),
               .static_smem_bytes = static_cast<int>(a.sharedSizeBytes),
               .max_threads_per_block = a.maxThreadsPerBlock,
               .blocks_per_sm = 0};
        return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&out.blocks_per_sm, kernel, kThreads, 0);
    }
};

}  // namespace flash
