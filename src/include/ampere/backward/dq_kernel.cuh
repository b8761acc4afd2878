// dQ by a kernel of its own: a block of queries walks over the keys that they see, makes S and dP again, and
// sums dQ in registers. Two products more than adding to float32 sums takes, but no sums, and equal bits in
// every run.
//
//     S = Q K^T     P = 2^(S - LSE)     dP = dO V^T     dS = P * (dP - delta)     dQ += dS K
#pragma once

#include "ampere/backward/barriers.cuh"
#include "ampere/backward/copies.cuh"
#include "ampere/backward/kernel_args.cuh"
#include "ampere/backward/products.cuh"
#include "ampere/backward/static_dq_configuration.cuh"
#include "common/backward/element.cuh"
#include "common/backward/row_store.cuh"
#include "common/backward/rows_of_none.cuh"
#include "common/backward/trimmed_tiles.cuh"
#include "common/kept_weights.cuh"
#include "common/softcap.cuh"

namespace flash::ampere {

// Barriers of the ring of K and V.
template <int kStages>
struct KeyRingBarriers {
    uint32_t smem;

    FLASH_DEVICE uint32_t at(int i) const { return smem + 8 * i; }
    FLASH_DEVICE uint32_t full_Q() const { return at(0); }  // and dO
    FLASH_DEVICE uint32_t full_K(int stage) const { return at(1 + stage); }
    FLASH_DEVICE uint32_t full_V(int stage) const { return at(1 + kStages + stage); }
    FLASH_DEVICE uint32_t empty_K(int stage) const { return at(1 + 2 * kStages + stage); }
    FLASH_DEVICE uint32_t empty_V(int stage) const { return at(1 + 3 * kStages + stage); }

    FLASH_DEVICE void initialize(int n_threads) const {
        const int warps = n_threads / kWarpSize * kArrivalsOfWarp;
        mbarrier_init(full_Q(), n_threads);
        for (int i = 0; i < kStages; ++i) {
            mbarrier_init(full_K(i), n_threads);
            mbarrier_init(full_V(i), n_threads);
            mbarrier_init(empty_K(i), warps);
            mbarrier_init(empty_V(i), warps);
        }
    }
    static FLASH_DEVICE void arrive(uint32_t barrier, int lane) {
        __syncwarp();
        if (arrives_for_warp(lane)) mbarrier_arrive(barrier);
    }
};

template <typename Kernel>
struct QueryGradientWarp {
    using Scores = Sums<Kernel::m_tiles, Kernel::B_c / kMmaN>;
    using Fragments = HeldOperand<Kernel::m_tiles, Kernel::key_tiles>;
    using dQSums = Sums<Kernel::m_tiles, Kernel::d_head / kMmaN>;

    const BackwardKernelArgs &args;
    const VisibleRows<Kernel::traits> mask;
    int batch, head;
    int first_row;  // of the warp
    int lane;
    uint32_t smem_Q, smem_dO;  // of the warp's rows
    uint32_t smem_rows;        // the LSE of the lane's first row, delta B_r numbers behind
    uint32_t lane_down, lane_right;

    // The LSE, or delta, of the lane's row 16 m + 8 r: read where it is needed, for want of registers.
    FLASH_DEVICE float lse(int m, int r) const {
        return __uint_as_float(load_shared_word(smem_rows + 4 * (m * kMmaM + 8 * r)));
    }
    FLASH_DEVICE float delta(int m, int r) const {
        return __uint_as_float(load_shared_word(smem_rows + 4 * (Kernel::B_r + m * kMmaM + 8 * r)));
    }

    // S or dP: (rows) x (keys).
    template <typename RowTile, typename KeyTile, int kSteps>
    FLASH_DEVICE void multiply_rows(Scores &S, uint32_t rows, uint32_t keys) const {
        S.clear();
        // The places of a product are worked out for it and not kept: 8 registers.
        const uint32_t lane_down = computed_here(this->lane_down),
                       lane_right = computed_here(this->lane_right);
        auto A = streamed<Kernel::m_tiles>([&](auto &fragment, int step) {
#pragma unroll
            for (int m = 0; m < Kernel::m_tiles; ++m) {
                ldmatrix(fragment.rmem[m], RowTile::fragment_offset(lane_down, m, step) + rows);
            }
        });
        multiply<Kernel::dtype, kSteps>(S, A, [&](uint32_t (&B)[4], int step, int n) {
            ldmatrix(B, KeyTile::fragment_offset(lane_right, n, step) + keys);
        });
    }

    FLASH_DEVICE void hide(Scores &S, int first_key) const {
        if (mask.sees_all(first_row, first_row + Kernel::warp_rows - 1,
                          {first_key, first_key + Kernel::B_c})) {
            return;
        }
        const int key = first_key + accumulator(lane, 0).column;
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const Range seen = mask.keys_of(first_row + m * kMmaM + 8 * r + lane / 4);
#pragma unroll
                for (int n = 0; n < Kernel::B_c / kMmaN; ++n) {
#pragma unroll
                    for (int column = 0; column < 2; ++column) {
                        if (!seen.has(key + n * kMmaN + column))
                            S.rmem[m][n][2 * r + column] = args.hidden_score;
                    }
                }
            }
        }
    }

    // P, times 2^shift and rounded to FP16; with softcap times 1 - tanh^2.
    FLASH_DEVICE void make_probabilities(Fragments &P, Scores &S, int first_key) const {
        if constexpr (Kernel::has_mod) return make_modified_probabilities(P, S, first_key);
        if constexpr (Kernel::traits.softcap) {
#pragma unroll
            for (auto &row : S.rmem) {
#pragma unroll
                for (auto &tile : row) {
#pragma unroll
                    for (float &score : tile) score = softcap_tanh(score * args.score_factor);
                }
            }
        }
        hide(S, first_key);
        const float factor = Kernel::traits.softcap ? args.exponent_factor : args.score_factor;
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float row_lse = lse(m, r);
#pragma unroll
                for (int n = 0; n < Kernel::B_c / kMmaN; ++n) {
                    const float *scores = &S.rmem[m][n][2 * r];
                    float low = exp2_approx(scores[0] * factor - row_lse);
                    float high = exp2_approx(scores[1] * factor - row_lse);
                    if constexpr (Kernel::traits.softcap) {
                        low *= fmaxf(1 - scores[0] * scores[0], 0.0f);
                        high *= fmaxf(1 - scores[1] * scores[1], 0.0f);
                    }
                    P.steps[n / 2].rmem[m][n % 2 * 2 + r] = pack_finite(low, high);
                }
            }
        }
    }

    // The same with functions of the user's, element by element. Rows that see nothing may be no rows.
    FLASH_DEVICE void make_modified_probabilities(Fragments &P, const Scores &S, int first_key) const {
        using Mod = HeadMod<typename Kernel::Mod>;
        const Mod mod(mod_of<typename Kernel::Mod>(args).captured, batch, head);
        const Range seeing = mask.seeing_rows();
        // Found out anew, so that nothing is held from block to block.
        const int lane = computed_here(this->lane);
        const int first_lane_key = first_key + accumulator(lane, 0).column;
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = first_row + m * kMmaM + 8 * r + lane / 4;
                const Range seen = seeing.has(row) ? mask.keys_of(row) : Range{0, 0};
                const float row_lse = lse(m, r);
                const auto of_row = mod.row(row);
#pragma unroll
                for (int n = 0; n < Kernel::B_c / kMmaN; ++n) {
                    float handed[2];
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const int key = first_lane_key + n * kMmaN + c;
                        const float given = S.rmem[m][n][2 * r + c] * args.score_factor;
                        handed[c] =
                            mod.probability(of_row, mod.column(key), given, row, key, row_lse).handed_on;
                        if (!seen.has(key)) handed[c] = 0.0f;
                    }
                    P.steps[n / 2].rmem[m][n % 2 * 2 + r] = pack_handed<Kernel::handed>(handed[0], handed[1]);
                }
            }
        }
    }

    // dP, divided by 1 - p, of weights that dropout keeps, and 0 of the others.
    FLASH_DEVICE void drop(Scores &dP, int first_key) const {
        if constexpr (Kernel::drops) {
            constexpr int kSquares = Kernel::B_c / kMmaN;  // of 16 rows
            const Dropout &dropout = mod_of<typename Kernel::Mod>(args).captured.dropout;
            const MatrixCoordinate first = accumulator(computed_here(lane), 0);
            const KeptOfQueries<Kernel::m_tiles * kSquares> kept(
                HeadDropout(dropout, batch, head), [&](int square) {
                    return MatrixCoordinate{first_row + square / kSquares * kMmaM + first.row,
                                            first_key + square % kSquares * kMmaN + first.column};
                });
#pragma unroll
            for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
                for (int n = 0; n < kSquares; ++n) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float &value = dP.rmem[m][n][i];
                        value = kept.has(m * kSquares + n, i) ? value * dropout.scale : 0.0f;
                    }
                }
            }
        }
    }

    // dS in P's place.
    FLASH_DEVICE void make_dS(Fragments &P, const Scores &dP) const {
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float row_delta = delta(m, r);
#pragma unroll
                for (int n = 0; n < Kernel::B_c / kMmaN; ++n) {
                    uint32_t &reg = P.steps[n / 2].rmem[m][n % 2 * 2 + r];
                    const float *values = &dP.rmem[m][n][2 * r];
                    const float2 p = unpack<Kernel::handed>(reg);
                    reg = pack<Kernel::dtype>(p.x * (values[0] - row_delta), p.y * (values[1] - row_delta));
                }
            }
        }
    }

    FLASH_DEVICE void add(dQSums &dQ, Fragments &dS, uint32_t smem_K) const {
        const uint32_t lane_down = computed_here(this->lane_down);
        multiply<Kernel::dtype, Kernel::key_tiles>(dQ, dS, [&](uint32_t (&B)[4], int step, int n) {
            ldmatrix_transposed(B, Kernel::KTile::fragment_offset(lane_down, step, n) + smem_K);
        });
    }

    // Rows that see no key get 0, whatever the sums hold.
    FLASH_DEVICE void store(const dQSums &dQ, char *row_0, int64_t row_bytes, Range seeing,
                            int owned_rows) const {
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = first_row + m * kMmaM + 8 * half + lane / 4;
                char *gmem = row_0 + row * row_bytes;
                const float factor = args.softmax_scale * unshifted(Kernel::dtype);
                if constexpr (Kernel::traits.float_query_gradients) {
#pragma unroll
                    for (int n = 0; n < Kernel::d_head / kMmaN; ++n) {
                        if (row < owned_rows && (!Kernel::traits.padded_head || n * kMmaN < args.d_head)) {
                            store_float_row(gmem + n * kMmaN * sizeof(float), dQ.rmem[m][n], half, factor,
                                            seeing.has(row), lane);
                        }
                    }
                } else {
#pragma unroll
                    for (int n = 0; n < Kernel::d_head / kMmaN; n += 4) {
                        Chunk chunk = row_chunk<Kernel::dtype>(dQ.rmem[m], n, half, factor, lane);
                        if (!seeing.has(row)) chunk = Chunk{};
                        const int column = (n + lane % 4) * kMmaN;
                        if (row < owned_rows && (!Kernel::traits.padded_head || column < args.d_head)) {
                            store_global(gmem + column * kElementBytes, chunk);
                        }
                    }
                }
            }
        }
    }
};

template <typename Kernel>
FLASH_DEVICE void compute_query_gradient(const BackwardKernelArgs &args) {
    constexpr BackwardTraits TRAITS = Kernel::traits;
    constexpr int stages = Kernel::stages;
    constexpr bool longest_first = TRAITS.causal || TRAITS.window;
    extern __shared__ char smem_begin[];
    const uint32_t smem = smem_address(smem_begin);
    const auto [batch, head, q_block] = args.query_grid.decode<longest_first>(blockIdx.x);
    SequenceRows q_seq{batch, 0, args.seq_len_q}, k_seq{batch, 0, args.seq_len_k};
    int owned_rows = args.seq_len_q;
    wait_for_prerequisites();  // the pre-pass
    if constexpr (TRAITS.varlen) {
        q_seq = sequence_rows(args.cu_seqlens_q, args.seqused_q, args.seq_len_q, args.rows_q, batch);
        k_seq = sequence_rows(args.cu_seqlens_k, args.seqused_k, args.seq_len_k, args.rows_k, batch);
        owned_rows = sequence_rows(args.cu_seqlens_q, nullptr, args.seq_len_q, args.rows_q, batch).n_rows;
        clear_gradient_rows_of_none(args.cu_seqlens_q, args.query_grid.total_heads / args.query_grid.n_heads,
                                    args.total_q, args.dQ, args.dQ_strides, args.n_heads, args.d_head);
    }
    const int tile_row = q_block * Kernel::B_r;
    if (tile_row >= owned_rows) return;

    const KeyRingBarriers<stages> barriers{smem + Kernel::smem_barriers};
    if (threadIdx.x == 0) barriers.initialize(Kernel::n_threads);
    __syncthreads();

    const int warp = uniform(threadIdx.x / kWarpSize), lane = threadIdx.x % kWarpSize;
    const VisibleRows<TRAITS> mask{.seq_len_q = q_seq.n_rows,
                                   .seq_len_k = k_seq.n_rows,
                                   .window_left = TRAITS.window ? args.window_left : 0,
                                   .window_right = TRAITS.window ? args.window_right : 0};
    const Range seeing = mask.seeing_rows(), seen = mask.seen_keys();
    // The rows of the tile that see keys, and the blocks of keys that they see.
    const Range rows{max_of(tile_row, seeing.begin), min_of(tile_row + Kernel::B_r, seeing.end)};
    Range blocks{0, 0};
    if (rows.begin < rows.end) {
        blocks = {mask.keys_of(rows.begin).begin / Kernel::B_c,
                  ceil_div(mask.keys_of(rows.end - 1).end, Kernel::B_c)};
    }
    if constexpr (trims_tiles<typename Kernel::Mod, true>()) {
        if (rows.begin < rows.end) {
            blocks = trimmed_key_tiles<typename Kernel::Mod, Kernel::B_c>(
                mod_of<typename Kernel::Mod>(args), blocks, rows, k_seq.n_rows, batch, head);
        }
    }

    const auto row_0 = [&](const void *tensor, const TensorStrides &strides, const SequenceRows &sequence,
                           int of_head) {
        const int64_t offset =
            sequence.batch * strides.batch + of_head * strides.head + sequence.first_row * strides.seq;
        return static_cast<const char *>(tensor) + offset * kElementBytes;
    };
    const int kv_head = head / args.heads_per_kv_head;
    const char *K = row_0(args.K, args.K_strides, k_seq, kv_head);
    const char *V = row_0(args.V, args.V_strides, k_seq, kv_head);
    const auto copy_K = [&](int block, int stage) {
        copy_tile<Kernel, typename Kernel::KTile>(smem + Kernel::smem_K + stage * Kernel::KTile::bytes, K,
                                                  args.K_strides.seq * kElementBytes, block * Kernel::B_c,
                                                  seen, args.d_head / kChunkElements, threadIdx.x);
        mbarrier_arrive_after_copies(barriers.full_K(stage));
    };
    const auto copy_V = [&](int block, int stage) {
        copy_tile<Kernel, typename Kernel::VTile>(smem + Kernel::smem_V + stage * Kernel::VTile::bytes, V,
                                                  args.V_strides.seq * kElementBytes, block * Kernel::B_c,
                                                  seen, args.d_head_v / kChunkElements, threadIdx.x);
        mbarrier_arrive_after_copies(barriers.full_V(stage));
    };

    const LaneRows lane_rows(lane);
    const QueryGradientWarp<Kernel> state{
        .args = args,
        .mask = mask,
        .batch = batch,
        .head = head,
        .first_row = tile_row + warp * Kernel::warp_rows,
        .lane = lane,
        .smem_Q = smem + Kernel::smem_Q + Kernel::QTile::tile_offset(warp * Kernel::m_tiles, 0),
        .smem_dO = smem + Kernel::smem_dO + Kernel::dOTile::tile_offset(warp * Kernel::m_tiles, 0),
        .smem_rows = smem + Kernel::smem_rows + 4 * (warp * Kernel::warp_rows + lane / 4),
        .lane_down = Kernel::KTile::offset(lane_rows.down.row, lane_rows.down.chunk),
        .lane_right = Kernel::KTile::offset(lane_rows.right.row, lane_rows.right.chunk),
    };
    typename QueryGradientWarp<Kernel>::dQSums dQ;
    dQ.clear();
    if (blocks.begin < blocks.end) {
        copy_tile<Kernel, typename Kernel::QTile>(
            smem + Kernel::smem_Q, row_0(args.Q, args.Q_strides, q_seq, head),
            args.Q_strides.seq * kElementBytes, tile_row, seeing, args.d_head / kChunkElements, threadIdx.x);
        copy_K(blocks.begin, 0);
        copy_tile<Kernel, typename Kernel::dOTile>(smem + Kernel::smem_dO,
                                                   row_0(args.dO, args.dO_strides, q_seq, head),
                                                   args.dO_strides.seq * kElementBytes, tile_row, seeing,
                                                   args.d_head_v / kChunkElements, threadIdx.x);
        const int64_t numbers = lse_begin(TRAITS.varlen && args.cu_seqlens_q != nullptr, q_seq, args.n_heads,
                                          head, args.seq_len_q, args.total_q);
        for (int i = threadIdx.x; i < Kernel::B_r; i += Kernel::n_threads) {
            const int row = tile_row + i;
            const bool exists = seeing.has(row);
            const uint32_t place = smem + Kernel::smem_rows + 4 * i;
            cp_async_number(place, args.lse_log2 + numbers + (exists ? row : 0), exists);
            cp_async_number(place + 4 * Kernel::B_r, args.delta + numbers + (exists ? row : 0), exists);
        }
        mbarrier_arrive_after_copies(barriers.full_Q());
        copy_V(blocks.begin, 0);
        RingPlace<stages> stage, ahead_stage;
        ahead_stage.advance();
        int ahead = blocks.begin + 1;
        const auto copy_next = [&] {
            if (ahead >= blocks.end) return;
            mbarrier_wait(barriers.empty_K(ahead_stage.slot), ahead_stage.parity ^ 1);
            copy_K(ahead, ahead_stage.slot);
            mbarrier_wait(barriers.empty_V(ahead_stage.slot), ahead_stage.parity ^ 1);
            copy_V(ahead, ahead_stage.slot);
            ++ahead;
            ahead_stage.advance();
        };
        mbarrier_wait(barriers.full_Q(), 0);
#pragma unroll 1
        for (int block = blocks.begin; block < blocks.end; ++block) {
            typename QueryGradientWarp<Kernel>::Scores S;
            typename QueryGradientWarp<Kernel>::Fragments P;
            const uint32_t smem_K = smem + Kernel::smem_K + stage.slot * Kernel::KTile::bytes;
            const uint32_t smem_V = smem + Kernel::smem_V + stage.slot * Kernel::VTile::bytes;
            mbarrier_wait(barriers.full_K(stage.slot), stage.parity);
            state.template multiply_rows<typename Kernel::QTile, typename Kernel::KTile, Kernel::d_tiles>(
                S, state.smem_Q, smem_K);
            if constexpr (stages > 1) copy_next();
            state.make_probabilities(P, S, block * Kernel::B_c);
            mbarrier_wait(barriers.full_V(stage.slot), stage.parity);
            state.template multiply_rows<typename Kernel::dOTile, typename Kernel::VTile, Kernel::d_v_tiles>(
                S, state.smem_dO, smem_V);
            barriers.arrive(barriers.empty_V(stage.slot), lane);
            state.drop(S, block * Kernel::B_c);
            state.make_dS(P, S);
            state.add(dQ, P, smem_K);
            barriers.arrive(barriers.empty_K(stage.slot), lane);
            if constexpr (stages == 1) copy_next();
            stage.advance();
        }
    }
    state.store(dQ, const_cast<char *>(row_0(args.dQ, args.dQ_strides, q_seq, head)),
                args.dQ_strides.seq * kElementBytes, blocks.begin < blocks.end ? seeing : Range{0, 0},
                owned_rows);
}

template <FlashBackwardKernelConfig CFG, BackwardTraits TRAITS>
__global__ void __launch_bounds__(StaticQueryGradientConfig<CFG, TRAITS>::n_threads,
                                  StaticQueryGradientConfig<CFG, TRAITS>::min_blocks_per_sm)
    flash_backward_dq_kernel(const __grid_constant__ BackwardKernelArgs args) {
    compute_query_gradient<StaticQueryGradientConfig<CFG, TRAITS>>(args);
}

// The same with functions of the user's.
template <FlashBackwardKernelConfig CFG, BackwardTraits TRAITS, typename MOD>
__global__ void __launch_bounds__(StaticQueryGradientConfig<CFG, TRAITS, MOD>::n_threads,
                                  StaticQueryGradientConfig<CFG, TRAITS, MOD>::min_blocks_per_sm)
    flash_backward_dq_mod_kernel(const __grid_constant__ BackwardArgs<MOD> args) {
    compute_query_gradient<StaticQueryGradientConfig<CFG, TRAITS, MOD>>(args);
}

}  // namespace flash::ampere
