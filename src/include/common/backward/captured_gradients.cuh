// Gradients of the tensors that a mod has captured: of each score that loads an element, dS times the
// derivative of the score by it, added up as captured_sums.cuh says.
//
// A thread block owns kRows queries of one head and goes over the keys that they see, once for the largest
// terms and once, in a second launch, for the sums. Each warp makes S = Q K^T and dP = dO V^T of its 16 rows,
//
//     P = e^(mod(scale S) - LSE)        dS = P (dP - delta)
//
// leaves them in shared memory, and then gives its threads one element after the other: code of the user's
// stands in the kernel once, not once for each of a thread's elements.
#pragma once

#include "backward.cuh"
#include "common/backward/captured_sums.cuh"
#include "common/backward/trimmed_tiles.cuh"
#include "common/backward/visible_rows.cuh"
#include "common/early_launch.cuh"
#include "common/fragments.cuh"
#include "common/kept_weights.cuh"
#include "common/mod.cuh"
#include "common/ptx.cuh"
#include "common/sequence_rows.cuh"
#include "common/softmax_scale.cuh"
#include "common/swizzling.cuh"

namespace flash {

template <typename Mod>
struct CapturedGradientArgs {
    const void *Q, *K, *V, *dO;
    TensorStrides Q_strides, K_strides, V_strides, dO_strides;
    const float *lse, *delta;
    int n_q_blocks, n_heads, heads_per_kv_head;
    int seq_len_q, seq_len_k;
    float softmax_scale;
    int window_left, window_right;
    const int *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;
    int64_t total_q;
    int rows_q, rows_k;
    int d_head, d_head_v;
    typename Mod::Captured captured;
    ModTiles tiles;
    int bits_of_terms[Mod::kGathered];
};

template <DType kDType, int kDHead, int kDHeadV, BackwardTraits TRAITS, typename MOD>
struct CapturedGradientKernel {
    using Mod = MOD;
    static constexpr DType dtype = kDType;
    static constexpr BackwardTraits traits = TRAITS;
    static constexpr int n_warps = 4, n_threads = n_warps * kWarpSize;
    static constexpr int kRows = n_warps * kMmaM;
    static constexpr int kKeys = max_of(kDHead, kDHeadV) > 128 ? 32 : 64;
    static constexpr int d_head = kDHead, d_head_v = kDHeadV;

    // Whole panels: what a narrower head lacks of its last one is zeros.
    static constexpr int columns = panel_count(kDHead) * kPanelColumns;
    static constexpr int columns_v = panel_count(kDHeadV) * kPanelColumns;
    using QTile = SmemTile<kRows, columns, true>;
    using dOTile = SmemTile<kRows, columns_v, true>;
    using KTile = SmemTile<kKeys, columns, true>;
    using VTile = SmemTile<kKeys, columns_v, true>;
    // S and dP of a warp, side by side: a row is as long as spreads 16 of them over all banks.
    static constexpr int pair_bytes = 2 * sizeof(float);
    static constexpr int score_row_bytes = (kKeys + 1) * pair_bytes;
    static constexpr int score_bytes = n_warps * kMmaM * score_row_bytes;

    static constexpr int smem_Q = 0;
    static constexpr int smem_dO = smem_Q + QTile::bytes;
    static constexpr int smem_K = smem_dO + dOTile::bytes;
    static constexpr int smem_V = smem_K + KTile::bytes;
    static constexpr int smem_scores = smem_K;  // K and V have been read then
    static constexpr int smem_bytes = smem_K + max_of(KTile::bytes + VTile::bytes, score_bytes);
};

// Rows of `valid` and columns of the tensor; zeros in the place of everything else.
template <typename Tile, int kThreads>
FLASH_DEVICE void copy_rows(uint32_t smem, const char *row_0, int64_t row_bytes, int first, Range valid,
                            int chunks) {
    constexpr int row_chunks = Tile::panels * Tile::row_chunks;
#pragma unroll 4
    for (int i = threadIdx.x; i < Tile::rows * row_chunks; i += kThreads) {
        const int row = i / row_chunks, chunk = i % row_chunks;
        Chunk value{};
        if (valid.has(first + row) && chunk < chunks) {
            value = load_global(row_0 + (first + row) * row_bytes + chunk * kChunkBytes);
        }
        store_shared(smem + Tile::offset(row, chunk), value);
    }
}

// A warp's 16 rows by all keys of a tile.
template <DType kDType, typename RowTile, typename KeyTile, int kSteps, int kKeys>
FLASH_DEVICE void multiply_tiles(float (&C)[kKeys / kMmaN][4], uint32_t rows, uint32_t keys, int lane) {
    const LdmatrixRow down = ldmatrix_row_QV(lane), right = ldmatrix_row_K(lane);
    const uint32_t lane_down = RowTile::offset(down.row, down.chunk);
    const uint32_t lane_right = KeyTile::offset(right.row, right.chunk);
#pragma unroll
    for (auto &tile : C) {
#pragma unroll
        for (float &value : tile) value = 0.0f;
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        uint32_t A[4];
        ldmatrix(A, RowTile::fragment_offset(lane_down, 0, step) + rows);
#pragma unroll
        for (int n = 0; n < kKeys / kMmaTile; ++n) {
            uint32_t B[4];
            ldmatrix(B, KeyTile::fragment_offset(lane_right, n, step) + keys);
            mma<kDType>(C[2 * n], A, B[0], B[1]);
            mma<kDType>(C[2 * n + 1], A, B[2], B[3]);
        }
    }
}

// The elements of a warp's tile of S and dP, one after the other, to `terms`.
template <typename Kernel, typename Terms>
struct CapturedTerms {
    using Mod = typename Kernel::Mod;

    const CapturedGradientArgs<Mod> &args;
    const VisibleRows<Kernel::traits> mask;
    const Range seeing;
    const int batch, head, first_row;  // of the warp
    const uint32_t smem;               // the warp's rows
    const int64_t numbers;             // in lse and delta, of the sequence's row 0
    const typename Mod::Once once;
    const typename Mod::Head of_head;

    FLASH_DEVICE void add(Terms &terms, int first_key, int lane) const {
        constexpr int n_keys = Kernel::kKeys, steps = kMmaM * n_keys / kWarpSize;
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
            // Along keys neighbouring lanes take neighbouring keys; else a lane goes along a row.
            const int place = Mod::kAlongKeys ? i * kWarpSize + lane : lane * steps + i;
            const int row = first_row + place / n_keys, key = first_key + place % n_keys;
            if (!seeing.has(row) || !mask.keys_of(row).has(key)) continue;
            const float2 pair = load_shared_float2(smem + place / n_keys * Kernel::score_row_bytes +
                                                   place % n_keys * Kernel::pair_bytes);
            add_score(terms, row, key, pair.x * args.softmax_scale, pair.y);
        }
    }

  private:
    FLASH_DEVICE void add_score(Terms &terms, int row, int key, float given, float dP) const {
        if constexpr (Mod::kDrops) {
            const Dropout &dropout = args.captured.dropout;
            dP = HeadDropout(dropout, batch, head).keeps(row, key) ? dP * dropout.scale : 0.0f;
        }
        const auto of_row = Mod::row(args.captured, once, of_head, batch, head, row);
        const auto of_key = Mod::column(args.captured, once, of_head, batch, head, key);
        if constexpr (Mod::kHidesKeys) {
            if (!Mod::visible(args.captured, once, of_head, of_row, of_key, given, batch, head, row, key))
                return;
        }
        const float score =
            Mod::score(args.captured, once, of_head, of_row, of_key, given, batch, head, row, key);
        const float lse = args.lse[numbers + row];
        const float P = lse == -INFINITY ? 0.0f : exp2_approx((score - lse) * kLog2e);
        const float dS = P * (dP - args.delta[numbers + row]);
        if (P == 0.0f || dS == 0.0f) return;
        Mod::gradients(args.captured, once, of_head, of_row, of_key, given, batch, head, row, key,
                       [&](auto load, auto tensor, const auto &sums, float slope, auto... indices) {
                           const int64_t offset = sums.place(indices...);
                           if (offset < 0 || slope == 0.0f) return;
                           terms.add(load, tensor, const_cast<int64_t *>(sums.data), offset, dS * slope);
                       });
    }
};

template <typename Kernel, bool kSums>
FLASH_DEVICE auto begin_terms(const CapturedGradientArgs<typename Kernel::Mod> &args) {
    using Mod = typename Kernel::Mod;
    if constexpr (kSums) {
        const int *const scales = Mod::scales(args.captured).data;
        TermSums<Mod::kGathered, Mod::kLoads> terms;
#pragma unroll
        for (int i = 0; i < Mod::kGathered; ++i) terms.powers[i] = power_of(scales[i], args.bits_of_terms[i]);
        return terms;
    } else {
        return LargestTerms<Mod::kGathered>{};
    }
}

template <typename Kernel, bool kSums>
__global__ void __launch_bounds__(Kernel::n_threads)
    captured_gradients_kernel(const __grid_constant__ CapturedGradientArgs<typename Kernel::Mod> args) {
    using Mod = typename Kernel::Mod;
    extern __shared__ __align__(1024) char captured_smem[];
    const uint32_t smem = smem_address(captured_smem);
    int *const scales = const_cast<int *>(Mod::scales(args.captured).data);
    auto terms = begin_terms<Kernel, kSums>(args);
    if constexpr (kSums) {
        if (blockIdx.x == 0 && threadIdx.x < Mod::kGathered) {
            scales[Mod::kGathered + threadIdx.x] =
                power_of(scales[threadIdx.x], args.bits_of_terms[threadIdx.x]);
        }
    }
    const int q_block = blockIdx.x % args.n_q_blocks, head = blockIdx.x / args.n_q_blocks % args.n_heads;
    const int batch = blockIdx.x / args.n_q_blocks / args.n_heads;
    SequenceRows q_seq{batch, 0, args.seq_len_q}, k_seq{batch, 0, args.seq_len_k};
    if constexpr (Kernel::traits.varlen) {
        q_seq = sequence_rows(args.cu_seqlens_q, args.seqused_q, args.seq_len_q, args.rows_q, batch);
        k_seq = sequence_rows(args.cu_seqlens_k, args.seqused_k, args.seq_len_k, args.rows_k, batch);
    }
    const VisibleRows<Kernel::traits> mask{.seq_len_q = q_seq.n_rows,
                                           .seq_len_k = k_seq.n_rows,
                                           .window_left = args.window_left,
                                           .window_right = args.window_right};
    const Range seeing = mask.seeing_rows(), seen = mask.seen_keys();
    const int first_row = q_block * Kernel::kRows;
    const Range rows{max_of(first_row, seeing.begin), min_of(first_row + Kernel::kRows, seeing.end)};
    if (rows.begin >= rows.end) return;
    const Range keys{mask.keys_of(rows.begin).begin, mask.keys_of(rows.end - 1).end};
    Range tiles{keys.begin / Kernel::kKeys, ceil_div(keys.end, Kernel::kKeys)};
    if constexpr (trims_tiles<Mod, true>()) {
        tiles = trimmed_key_tiles<Mod, Kernel::kKeys>({args.captured, args.tiles}, tiles, rows, k_seq.n_rows,
                                                      batch, head);
    }

    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, warp_row = warp * kMmaM;
    const int kv_head = head / args.heads_per_kv_head;
    const auto copy = [&]<typename Tile>(Tile, int place, const void *tensor, const TensorStrides &strides,
                                         const SequenceRows &sequence, int of_head, int first, Range valid,
                                         int columns) {
        const int64_t offset =
            sequence.batch * strides.batch + of_head * strides.head + sequence.first_row * strides.seq;
        copy_rows<Tile, Kernel::n_threads>(
            smem + place, static_cast<const char *>(tensor) + offset * kElementBytes,
            strides.seq * kElementBytes, first, valid, columns / kChunkElements);
    };
    copy(typename Kernel::QTile{}, Kernel::smem_Q, args.Q, args.Q_strides, q_seq, head, first_row, seeing,
         args.d_head);
    copy(typename Kernel::dOTile{}, Kernel::smem_dO, args.dO, args.dO_strides, q_seq, head, first_row, seeing,
         args.d_head_v);
    const auto once = Mod::once(args.captured);
    const uint32_t smem_scores = smem + Kernel::smem_scores + warp_row * Kernel::score_row_bytes;
    const CapturedTerms<Kernel, decltype(terms)> elements{
        .args = args,
        .mask = mask,
        .seeing = seeing,
        .batch = batch,
        .head = head,
        .first_row = first_row + warp_row,
        .smem = smem_scores,
        .numbers = lse_begin(Kernel::traits.varlen && args.cu_seqlens_q != nullptr, q_seq, args.n_heads, head,
                             args.seq_len_q, args.total_q),
        .once = once,
        .of_head = Mod::head(args.captured, once, batch, head),
    };
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        const int first_key = tile * Kernel::kKeys;
        __syncthreads();  // scores of the tile before, which lie where K and V do, have been read
        copy(typename Kernel::KTile{}, Kernel::smem_K, args.K, args.K_strides, k_seq, kv_head, first_key,
             seen, args.d_head);
        copy(typename Kernel::VTile{}, Kernel::smem_V, args.V, args.V_strides, k_seq, kv_head, first_key,
             seen, args.d_head_v);
        __syncthreads();
        float S[Kernel::kKeys / kMmaN][4], dP[Kernel::kKeys / kMmaN][4];
        multiply_tiles<Kernel::dtype, typename Kernel::QTile, typename Kernel::KTile,
                       Kernel::d_head / kMmaTile, Kernel::kKeys>(
            S, smem + Kernel::smem_Q + Kernel::QTile::tile_offset(warp, 0), smem + Kernel::smem_K, lane);
        multiply_tiles<Kernel::dtype, typename Kernel::dOTile, typename Kernel::VTile,
                       Kernel::d_head_v / kMmaTile, Kernel::kKeys>(
            dP, smem + Kernel::smem_dO + Kernel::dOTile::tile_offset(warp, 0), smem + Kernel::smem_V, lane);
        __syncthreads();  // K and V have been read by all
#pragma unroll
        for (int n = 0; n < Kernel::kKeys / kMmaN; ++n) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint32_t place = smem_scores + (lane / 4 + 8 * r) * Kernel::score_row_bytes +
                                       (n * kMmaN + 2 * (lane % 4)) * Kernel::pair_bytes;
                for (int c = 0; c < 2; ++c) {
                    store_shared(place + c * Kernel::pair_bytes, __float_as_uint(S[n][2 * r + c]));
                    store_shared(place + c * Kernel::pair_bytes + 4, __float_as_uint(dP[n][2 * r + c]));
                }
            }
        }
        __syncwarp();
        elements.add(terms, first_key, lane);
    }
    terms.finish(scales);
}

// Of each translation unit its own, as the stubs of kernels are (static): kernels of one library may share a
// mod, and what is set here has to be set of the stub that is launched below.
template <typename Kernel>
static cudaError_t load_captured_gradients() {
    cudaError_t error = cudaFuncSetAttribute(&captured_gradients_kernel<Kernel, false>,
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::smem_bytes);
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(&captured_gradients_kernel<Kernel, true>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::smem_bytes);
}

// Behind what makes delta, on the same stream. Sums and scales begin as 0: the caller has cleared them.
template <typename Kernel>
static cudaError_t launch_captured_gradients(const BackwardProblem &problem, cudaStream_t stream) {
    using Mod = typename Kernel::Mod;
    const int n_q_blocks = ceil_div(problem.seq_len_q, Kernel::kRows);
    const int64_t blocks = int64_t(problem.batch) * problem.n_heads * n_q_blocks;
    if (blocks == 0 || problem.seq_len_k == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    CapturedGradientArgs<Mod> args{
        .Q = problem.q,
        .K = problem.k,
        .V = problem.v,
        .dO = problem.dout,
        .Q_strides = problem.q_strides,
        .K_strides = problem.k_strides,
        .V_strides = problem.v_strides,
        .dO_strides = problem.dout_strides,
        .lse = problem.lse,
        .delta = problem.delta,
        .n_q_blocks = n_q_blocks,
        .n_heads = problem.n_heads,
        .heads_per_kv_head = problem.n_heads / problem.n_heads_kv,
        .seq_len_q = problem.seq_len_q,
        .seq_len_k = problem.seq_len_k,
        .softmax_scale = problem.softmax_scale,
        .window_left = Kernel::traits.window ? problem.window_left : 0,
        .window_right = Kernel::traits.window ? problem.window_right : 0,
        .cu_seqlens_q = problem.cu_seqlens_q,
        .cu_seqlens_k = problem.cu_seqlens_k,
        .seqused_q = problem.seqused_q,
        .seqused_k = problem.seqused_k,
        .total_q = problem.total_q,
        .rows_q = nameable_rows(problem.total_q),
        .rows_k = nameable_rows(problem.total_k),
        .d_head = problem.d_head,
        .d_head_v = problem.d_head_v,
        .captured = Mod::captured(*problem.mod),
        .tiles = problem.mod->tiles,
    };
    for (int i = 0; i < Mod::kGathered; ++i) {
        args.bits_of_terms[i] = bits_of_terms(Mod::gathered[i], problem.batch, problem.n_heads,
                                              problem.seq_len_q, problem.seq_len_k);
    }
    void *parameters[] = {&args};
    for (const void *kernel : {reinterpret_cast<const void *>(&captured_gradients_kernel<Kernel, false>),
                               reinterpret_cast<const void *>(&captured_gradients_kernel<Kernel, true>)}) {
        const cudaError_t error = launch_kernel<false>(
            kernel, static_cast<unsigned>(blocks), Kernel::n_threads, Kernel::smem_bytes, stream, parameters);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

// The same for a kernel of either family: nothing where its mod gathers no gradients.
template <typename Kernel>
constexpr bool gathers_gradients() {
    if constexpr (is_mod<typename Kernel::Mod>) return Kernel::Mod::kGathered > 0;
    return false;
}
template <typename Kernel>
struct GatheringOf {
    using Type = CapturedGradientKernel<Kernel::dtype, Kernel::d_head, Kernel::d_head_v, Kernel::traits,
                                        typename Kernel::Mod>;
};

template <typename Kernel>
cudaError_t load_gathering() {
    if constexpr (gathers_gradients<Kernel>()) {
        return load_captured_gradients<typename GatheringOf<Kernel>::Type>();
    } else {
        return cudaSuccess;
    }
}

template <typename Kernel>
cudaError_t launch_gathering(const BackwardProblem &problem, cudaStream_t stream) {
    if constexpr (gathers_gradients<Kernel>()) {
        return launch_captured_gradients<typename GatheringOf<Kernel>::Type>(problem, stream);
    } else {
        return cudaSuccess;
    }
}

}  // namespace flash
