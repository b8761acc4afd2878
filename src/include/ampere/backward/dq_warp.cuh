// A warp of the kernel of dQ alone: a share of the block's queries, in all products of a block of keys, and
// what lies between these. Rows are queries: P and dS go from product to product in registers.
#pragma once

#include "ampere/backward/kernel_args.cuh"
#include "ampere/backward/products.cuh"
#include "ampere/backward/static_dq_configuration.cuh"
#include "common/backward/element.cuh"
#include "common/backward/row_store.cuh"
#include "common/backward/visible_rows.cuh"
#include "common/kept_weights.cuh"
#include "common/softcap.cuh"

namespace flash::ampere {

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

}  // namespace flash::ampere
