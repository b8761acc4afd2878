// Two warps that share their query rows and halve d_head: what they tell each other.
//
// With d_head 256 a warp has registers for O of 16 rows only, and then reads each fragment of K and V for one
// row tile: shared memory is what limits. Two warps with 32 rows together, each with 128 columns of Q, K, V
// and O, read every fragment for two row tiles. Q K^T over one half of d_head is half of each score:
//
//     warp 0   Q[:, 0:128] K[:, 0:128]^T       keys 0:32 ──── + ─── softmax, P[:, 0:32]  ─┬─  O[:, 0:128] +=
//     P V
//                                              keys 32:64 ─╲ ╱                            ╳
//     warp 1   Q[:, 128:256] K[:, 128:256]^T   keys 0:32 ──╱ ╲
//                                              keys 32:64 ─── + ─── softmax, P[:, 32:64] ─┴─  O[:, 128:256]
//                                              += P V
//
// Each warp makes P of one half of the keys. Before every message stands work that does not need it: the next
// copies before the scores, P V of the warp's own keys before the other's P.
//
// Each warp has a box in shared memory, 16 bytes a lane and step. All messages go from a lane to the same
// lane of the other warp, whose fragments have the same places. Scores go into the sender's box. When the
// other warp has read them, it puts maxima and P into that box: their reader is the one who writes scores
// there next. So one barrier of the pair for each message is enough.
#pragma once

#include "ampere/forward/static_kernel_configuration.cuh"
#include "ampere/gemm.cuh"
#include "common/ptx.cuh"

namespace flash::ampere {

// P of one half of a block's keys.
template <typename Kernel>
struct PairProbabilities {
    AFragment<Kernel> rmem[Kernel::warp_key_tiles];  // (warp_rows, B_c / 2)
};

template <typename Kernel>
struct WarpPair {
    static constexpr int step_bytes = kWarpSize * kChunkBytes;
    static constexpr int row_steps = (Kernel::m_tiles + 1) / 2;  // of share: 2 floats for each row tile

    uint32_t smem;  // the pair's boxes
    int half;       // of d_head in the products, of the keys in the softmax

    // Bytes from a block's first row to those of one half of its keys.
    static FLASH_DEVICE uint32_t key_offset(int half) {
        return Kernel::KVTile::tile_offset(half * Kernel::warp_key_tiles, 0);
    }

    // S begins with the warp's own keys; the other half goes to the other warp.
    FLASH_DEVICE void send_scores(const BlockScores<Kernel> &S) const {
        const uint32_t box = box_of(half);
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int n = 0; n < tiles; ++n) {
                const float (&tile)[4] = S.rmem[m][tiles + n];
                store_shared(box + (m * tiles + n) * step_bytes, as_chunk(tile));
            }
        }
    }

    FLASH_DEVICE Scores<Kernel> receive_scores(const BlockScores<Kernel> &S) const {
        Scores<Kernel> sum;
        meet();  // both have sent
        const uint32_t box = box_of(1 - half);
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
#pragma unroll
            for (int n = 0; n < tiles; ++n) {
                const Chunk other = load_shared(box + (m * tiles + n) * step_bytes);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sum.rmem[m][n][i] = S.rmem[m][n][i] + __uint_as_float(other.reg[i]);
            }
        }
        return sum;
    }

    FLASH_DEVICE void send_probabilities(const PairProbabilities<Kernel> &P) const {
        const uint32_t box = box_of(1 - half) + row_steps * step_bytes;
#pragma unroll
        for (int k = 0; k < Kernel::warp_key_tiles; ++k) {
#pragma unroll
            for (int m = 0; m < Kernel::m_tiles; ++m) {
                const uint32_t (&reg)[4] = P.rmem[k].rmem[m];
                store_shared(box + (k * Kernel::m_tiles + m) * step_bytes,
                             Chunk{reg[0], reg[1], reg[2], reg[3]});
            }
        }
    }

    FLASH_DEVICE void receive_probabilities(PairProbabilities<Kernel> &P) const {
        meet();  // both have sent
        const uint32_t box = box_of(half) + row_steps * step_bytes;
#pragma unroll
        for (int k = 0; k < Kernel::warp_key_tiles; ++k) {
#pragma unroll
            for (int m = 0; m < Kernel::m_tiles; ++m) {
                const Chunk other = load_shared(box + (k * Kernel::m_tiles + m) * step_bytes);
#pragma unroll
                for (int i = 0; i < 4; ++i) P.rmem[k].rmem[m][i] = other.reg[i];
            }
        }
    }

    // value := combine(value, the other warp's value), for values of a thread's rows.
    template <typename Combine>
    FLASH_DEVICE void share(float (&values)[Kernel::m_tiles][2], Combine combine) const {
        const uint32_t to = box_of(1 - half), from = box_of(half);
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; m += 2) {
            const int next = min_of(m + 1, Kernel::m_tiles - 1);
            const float pair[4] = {values[m][0], values[m][1], values[next][0], values[next][1]};
            store_shared(to + m / 2 * step_bytes, as_chunk(pair));
        }
        meet();  // both have written
#pragma unroll
        for (int m = 0; m < Kernel::m_tiles; ++m) {
            const Chunk other = load_shared(from + m / 2 * step_bytes);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                values[m][r] = combine(values[m][r], __uint_as_float(other.reg[m % 2 * 2 + r]));
            }
        }
    }

  private:
    static constexpr int tiles = Kernel::warp_keys / kMmaN;
    static_assert(!Kernel::paired_warps ||
                      (row_steps + Kernel::warp_key_tiles * Kernel::m_tiles) * step_bytes <=
                          Kernel::box_bytes,
                  "maxima and P must fit the box of the scores");

    static FLASH_DEVICE void meet() {
        named_barrier_sync(1 + computed_here(threadIdx.x) / (2 * kWarpSize), 2 * kWarpSize);
    }

    FLASH_DEVICE uint32_t box_of(int of_half) const {
        const int lane = computed_here(threadIdx.x) % kWarpSize;
        return smem + of_half * Kernel::box_bytes + lane * kChunkBytes;
    }

    static FLASH_DEVICE Chunk as_chunk(const float (&x)[4]) {
        return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
    }
};

}  // namespace flash::ampere
