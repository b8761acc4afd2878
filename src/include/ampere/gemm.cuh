// The two products of a K/V block, for the rows of one warp:
//
//     S (warp_rows, B_c)     = Q (warp_rows, d_head) K^T (d_head, B_c)       reduction along d_head
//     O (warp_rows, d_head) += P (warp_rows, B_c)    V   (B_c, d_head)       reduction along the keys
//
// Both walk along the reduction dimension in tiles of 16. *_mma_load_K_tiles says how many tiles of
// an operand are loaded at a time, mma_double_buffer_loads whether the next ones load meanwhile. This is
// the order of the program and the number of registers it names; within it ptxas moves ldmatrix and mma
// past each other as it sees fit, unless registers suffice to hold it to that order (orders_loads). With
// fragments_ahead, K and V come one ldmatrix at a time, which is what
// large accumulators leave registers for.
#pragma once

#include "ampere/forward/static_kernel_configuration.cuh"
#include "ampere/load_store.cuh"
#include "common/ptx.cuh"

namespace flash::ampere {

// Accumulators: (warp_rows, kColumns), [16-row tile][8-column tile][accumulator of fragments.cuh].
template <typename Kernel, int kColumns>
struct Accumulator {
    float rmem[Kernel::m_tiles][kColumns / kMmaN][4];

    FLASH_DEVICE void clear() {
#pragma unroll
        for (auto &row : rmem) {
#pragma unroll
            for (auto &tile : row) {
#pragma unroll
                for (float &value : tile) value = 0.0f;
            }
        }
    }
};

// What Q K^T gives, and what of it the warp makes P of: in a pair of warps (warp_pair.cuh), sums over one
// half of d_head for all keys, and whole sums for one half of the keys.
template <typename Kernel>
using BlockScores = Accumulator<Kernel, Kernel::B_c>;
template <typename Kernel>
using Scores = Accumulator<Kernel, Kernel::warp_keys>;
template <typename Kernel>
using Output = Accumulator<Kernel, Kernel::warp_d>;

// Operands, one tile of 16 along the reduction dimension.
template <typename Kernel>
struct AFragment {
    uint32_t rmem[Kernel::m_tiles][4];  // (warp_rows, 16)
};
template <int kColumns>
struct BFragment {
    uint32_t rmem[kColumns / kMmaTile][4];  // (16, kColumns)
};

// C (warp_rows, 16 columns from 16 * n) += A (warp_rows, 16) B (16, 16)
template <typename Kernel, int kColumns>
FLASH_DEVICE void multiply_tile(Accumulator<Kernel, kColumns> &C, const AFragment<Kernel> &A,
                                const uint32_t (&B)[4], int n) {
#pragma unroll
    for (int m = 0; m < Kernel::m_tiles; ++m) {
        mma<Kernel::dtype>(C.rmem[m][2 * n], A.rmem[m], B[0], B[1]);
        mma<Kernel::dtype>(C.rmem[m][2 * n + 1], A.rmem[m], B[2], B[3]);
    }
}

// A warp's Q, held in registers or streamed from shared memory for every K block.
template <typename Kernel>
struct QueryOperand {
    using Fragment = AFragment<Kernel>;
    using Stream = FragmentStream<Fragment, Kernel::d_tiles, Kernel::cfg.Q_mma_load_K_tiles,
                                  Kernel::cfg.mma_double_buffer_loads, kAsCompiled>;  // K's order is Q's too

    uint32_t smem_rows;    // of the warp
    uint32_t lane_offset;  // in a tile of 16 rows; the same as in V
    Fragment held[Kernel::holds_Q ? Kernel::d_tiles : 1];

    // `smem`: the warp's columns of Q; `group`: number of the warp, or of the pair.
    FLASH_DEVICE QueryOperand(uint32_t smem, int group, int lane) {
        const LdmatrixRow at = ldmatrix_row_QV(lane);
        smem_rows = smem + Kernel::QTile::tile_offset(group * Kernel::m_tiles, 0);
        lane_offset = Kernel::QTile::offset(at.row, at.chunk);
    }

    FLASH_DEVICE void load(Fragment &fragment, int d_tile) const {
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
            ldmatrix(fragment.rmem[m], fragment_address(m, d_tile));
        }
    }

    FLASH_DEVICE void load_in_place(Fragment &fragment, int d_tile) const {
        FragmentAddress<typename Kernel::QTile> address{lane_offset, smem_rows};
        address.step_to(d_tile);
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) ldmatrix(fragment.rmem[m], address.of(m, d_tile));
    }

    // Flips the sign of what the warp reads, in shared memory.
    FLASH_DEVICE void negate() const {
#pragma unroll
        for (int k = 0; k < Kernel::d_tiles; ++k) {
#pragma unroll
            for (int m = 0; m < Kernel::m_tiles; ++m) {
                const uint32_t address = fragment_address(m, k);
                Chunk chunk = load_shared(address);
#pragma unroll
                for (uint32_t &pair : chunk.reg) pair ^= 0x80008000;
                store_shared(address, chunk);
            }
        }
        __syncwarp();  // ldmatrix reads what other lanes have negated
    }

    // Loads all of Q, for the rest of the kernel.
    FLASH_DEVICE void hold() {
#pragma unroll
        for (int k = 0; k < Kernel::d_tiles; ++k) load(held[k], k);
    }

  private:
    FLASH_DEVICE uint32_t fragment_address(int row_tile, int d_tile) const {
        return Kernel::QTile::fragment_offset(computed_here(lane_offset), row_tile, d_tile) + smem_rows;
    }
};

// S = Q K^T
template <typename Kernel>
struct ScoreProduct {
    using Fragment = BFragment<Kernel::B_c>;
    uint32_t smem_K;  // the warp's columns
    int half;         // of the keys, that S begins with
    uint32_t lane_offset;

    FLASH_DEVICE ScoreProduct(uint32_t smem, int lane, int first_half) : smem_K(smem), half(first_half) {
        const LdmatrixRow at = ldmatrix_row_K(lane);
        lane_offset = Kernel::KVTile::offset(at.row, at.chunk);
    }

    // `slot`: bytes from the first K block's place to this one's.
    // `size`: see divide_schedule.
    FLASH_DEVICE void operator()(BlockScores<Kernel> &S, const QueryOperand<Kernel> &Q, uint32_t slot,
                                 int size) const {
        S.clear();
        if constexpr (Kernel::cfg.fragments_ahead > 0) {
            multiply_by_fragments(S, Q, slot);
        } else {
            multiply_by_tiles(S, Q, slot, size);
        }
    }

  private:
    template <int kFirstPlace>
    using Stream = FragmentStream<Fragment, Kernel::d_tiles, Kernel::cfg.K_mma_load_K_tiles,
                                  Kernel::cfg.mma_double_buffer_loads, kFirstPlace>;
    static constexpr int fragment_registers =
        Stream<kAsCompiled>::registers + (Kernel::holds_Q ? 0 : QueryOperand<Kernel>::Stream::registers);
    // S is zero, and takes no registers, before the first products.
    static constexpr bool ordered =
        Kernel::orders_loads(fragment_registers, Stream<kAsCompiled>::group < Kernel::d_tiles);

    FLASH_DEVICE void multiply_by_tiles(BlockScores<Kernel> &S, const QueryOperand<Kernel> &Q, uint32_t slot,
                                        int size) const {
        typename QueryOperand<Kernel>::Stream Q_stream;
        Stream<ordered ? 0 : kAsCompiled> K_stream;
#pragma unroll
        for (int k = 0; k < Kernel::d_tiles; ++k) {
            if constexpr (!Kernel::holds_Q) {
                Q_stream.prepare(k, size, [&](auto &fragment, int tile) { Q.load(fragment, tile); });
            }
            K_stream.prepare(k, size, [&](Fragment &fragment, int tile) { load(fragment, tile, slot); });
            if constexpr (Kernel::holds_Q) {
                multiply(S, Q.held[k], K_stream[k]);
            } else {
                multiply(S, Q_stream[k], K_stream[k]);
            }
        }
    }

    FLASH_DEVICE void multiply_by_fragments(BlockScores<Kernel> &S, const QueryOperand<Kernel> &Q,
                                            uint32_t slot) const {
        using Tile = typename Kernel::KVTile;
        AFragment<Kernel> Q_rmem[2];
        FragmentAddress<Tile> address{lane_offset, smem_K + slot};
        const uint32_t key_tiles[2] = {key_offset(half),
                                       key_offset(1 - half)};  // the second is of a pair only
        stream_fragments<Kernel::cfg.fragments_ahead, Kernel::d_tiles * Kernel::key_tiles>(
            [&](uint32_t (&K)[4], int i) {
                const int k = i / Kernel::key_tiles, n = i % Kernel::key_tiles;
                const int d_tile = panel_order(k, Kernel::d_tiles);
                if (n == 0) {
                    address.step_to(d_tile);
                    if constexpr (!Kernel::holds_Q) Q.load_in_place(Q_rmem[k % 2], d_tile);
                }
                ldmatrix(K, address.of(n % Kernel::warp_key_tiles, d_tile) +
                                key_tiles[n / Kernel::warp_key_tiles]);
            },
            [&](const uint32_t (&K)[4], int i) {
                const int k = i / Kernel::key_tiles, n = i % Kernel::key_tiles;
                if constexpr (Kernel::holds_Q) {
                    multiply_tile(S, Q.held[panel_order(k, Kernel::d_tiles)], K, n);
                } else {
                    multiply_tile(S, Q_rmem[k % 2], K, n);
                }
            });
    }

    static FLASH_DEVICE uint32_t key_offset(int half) {
        return Kernel::paired_warps ? Kernel::KVTile::tile_offset(half * Kernel::warp_key_tiles, 0) : 0;
    }

    FLASH_DEVICE void load(Fragment &fragment, int d_tile, uint32_t slot) const {
#pragma unroll
        for (int n = 0; n < Kernel::key_tiles; ++n) {
            ldmatrix(fragment.rmem[n],
                     Kernel::KVTile::fragment_offset(lane_offset, n, d_tile) + smem_K + slot);
        }
    }

    static FLASH_DEVICE void multiply(BlockScores<Kernel> &S, const AFragment<Kernel> &Q, const Fragment &K) {
#pragma unroll
        for (int n = 0; n < Kernel::key_tiles; ++n) multiply_tile(S, Q, K.rmem[n], n);
    }
};

// O += P V
template <typename Kernel>
struct OutputProduct {
    using Fragment = BFragment<Kernel::warp_d>;
    uint32_t smem_V;  // the warp's columns
    uint32_t lane_offset;

    FLASH_DEVICE OutputProduct(uint32_t smem, int lane) : smem_V(smem) {
        const LdmatrixRow at = ldmatrix_row_QV(lane);
        lane_offset = Kernel::KVTile::offset(at.row, at.chunk);
    }

    // `P`: called for key tiles 0, 1, …, returns the A fragment of 16 keys. It is made just before it is
    // multiplied, so that S and P are never both in registers as a whole, and exp2 runs between products.
    // `slot`: bytes from the first V block's place to this one's, or to that of the keys that P has.
    // `size`: see divide_schedule.
    template <typename MakeP>
    FLASH_DEVICE void operator()(Output<Kernel> &O, MakeP P, uint32_t slot, int size) const {
        if constexpr (Kernel::cfg.fragments_ahead > 0) {
            multiply_by_fragments(O, P, slot);
        } else {
            multiply_by_tiles(O, P, slot, size);
        }
    }

  private:
    template <int kFirstPlace>
    using Stream = FragmentStream<Fragment, Kernel::warp_key_tiles, Kernel::cfg.V_mma_load_K_tiles,
                                  Kernel::cfg.mma_double_buffer_loads, kFirstPlace>;
    static constexpr int P_registers = Kernel::m_tiles * 4;
    static constexpr bool ordered = Kernel::orders_loads(Stream<kAsCompiled>::registers + P_registers, true);

    template <typename MakeP>
    FLASH_DEVICE void multiply_by_tiles(Output<Kernel> &O, MakeP P, uint32_t slot, int size) const {
        Stream<ordered ? 2 * Kernel::d_tiles : kAsCompiled> V_stream;  // behind K's places
#pragma unroll
        for (int k = 0; k < Kernel::warp_key_tiles; ++k) {
            V_stream.prepare(k, size, [&](Fragment &fragment, int tile) { load(fragment, tile, slot); });
            multiply(O, P(k), V_stream[k]);
        }
    }

    template <typename MakeP>
    FLASH_DEVICE void multiply_by_fragments(Output<Kernel> &O, MakeP make_P, uint32_t slot) const {
        using Tile = typename Kernel::KVTile;
        AFragment<Kernel> P;
        FragmentAddress<Tile> address{lane_offset, smem_V + slot};
        stream_fragments<Kernel::cfg.fragments_ahead, Kernel::d_tiles * Kernel::warp_key_tiles>(
            [&](uint32_t (&V)[4], int i) {
                const int n = panel_order(i % Kernel::d_tiles, Kernel::d_tiles);
                address.step_to(n);
                ldmatrix_transposed(V, address.of(i / Kernel::d_tiles, n));
            },
            [&](const uint32_t (&V)[4], int i) {
                if (i % Kernel::d_tiles == 0) P = make_P(i / Kernel::d_tiles);
                multiply_tile(O, P, V, panel_order(i % Kernel::d_tiles, Kernel::d_tiles));
            });
    }

    FLASH_DEVICE void load(Fragment &fragment, int key_tile, uint32_t slot) const {
#pragma unroll
        for (int n = 0; n < Kernel::d_tiles; ++n) {
            ldmatrix_transposed(fragment.rmem[n],
                                Kernel::KVTile::fragment_offset(lane_offset, key_tile, n) + smem_V + slot);
        }
    }

    static FLASH_DEVICE void multiply(Output<Kernel> &O, const AFragment<Kernel> &P, const Fragment &V) {
#pragma unroll
        for (int n = 0; n < Kernel::d_tiles; ++n) multiply_tile(O, P, V.rmem[n], n);
    }
};

}  // namespace flash::ampere
