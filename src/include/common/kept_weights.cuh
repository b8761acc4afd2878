// Which of a thread's weights dropout keeps, as bits: found by a loop that is not unrolled, for the ten
// rounds of each counter would fill the instruction cache, and their keys the registers.
#pragma once

#include "common/dropout.cuh"
#include "common/fragments.cuh"
#include "common/ptx.cuh"

namespace flash {

// Dropout in one head of a batch item.
struct HeadDropout {
    uint64_t seed;
    uint32_t threshold;
    int batch, head;

    FLASH_DEVICE HeadDropout(const Dropout &dropout, int batch, int head)
        : threshold(dropout.threshold), batch(batch), head(head) {
        // Read where it is needed: no register holds it from block to block.
        asm volatile("ld.global.nc.u64 %0, [%1];" : "=l"(seed) : "l"(dropout.seed));
    }

    // See flash::kept.
    FLASH_DEVICE uint32_t kept(int q, int k) const { return flash::kept(seed, threshold, batch, head, q, k); }
    FLASH_DEVICE bool keeps(int q, int k) const {
        return random_word(seed, uint32_t(batch), uint32_t(head), uint32_t(q), uint32_t(k)) >= threshold;
    }
};

// Of a kernel that drops nothing.
struct AllKept {
    FLASH_DEVICE bool has(int, int) const { return true; }
};

// Of accumulators whose rows are queries. 16 queries by 8 keys are a square, of which the thread has four
// elements (fragments.cuh).
template <int kSquares>
class KeptOfQueries {
  public:
    // place(square): query and key of the thread's first element, as row and column.
    template <typename Place>
    FLASH_DEVICE KeptOfQueries(const HeadDropout &dropout, const Place &place) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            constexpr int kLast = kSquares - 8 * (kWords - 1);
            const int n = w + 1 < kWords ? 8 : kLast;
            uint32_t word = 0;
#pragma unroll 2
            for (int i = 0; i < n; ++i) {
                const MatrixCoordinate at = place(8 * w + i);
                word |= dropout.kept(at.row, at.column) << 4 * i;
            }
            words_[w] = word;
        }
    }

    // Element 0 … 3 of a square.
    FLASH_DEVICE bool has(int square, int element) const {
        return words_[square / 8] >> (4 * (square % 8) + element) & 1;
    }

  private:
    static constexpr int kWords = ceil_div(kSquares, 8);
    uint32_t words_[kWords];
};

// Of accumulators whose rows are keys, 16 keys by 16 queries a block.
template <int kBlocks>
class KeptOfKeys {
  public:
    KeptOfKeys() = default;

    // place(block): key and query of the thread's first element, as row and column. All lanes come here.
    template <typename Place>
    FLASH_DEVICE KeptOfKeys(const HeadDropout &dropout, const Place &place) {
        const int odd = threadIdx.x / 4 % 2;  // of the thread's keys
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            constexpr int kLast = kBlocks - 4 * (kWords - 1);
            const int n = w + 1 < kWords ? 4 : kLast;
            uint32_t word = 0;
#pragma unroll 1
            for (int i = 0; i < n; ++i) {
                const MatrixCoordinate at = place(4 * w + i);
                const int key = at.row - odd, query = at.column + odd;
                word |= (dropout.kept(query, key) | dropout.kept(query, key + 8) << 4) << 8 * i;
            }
            words_[w] = kept_of_key(word, __shfl_xor_sync(kAllLanes, word, 4), odd != 0);
        }
    }

    // Of the block's keys the thread's upper (0) or lower one, of its queries 0, 1, or, in the right half, 2,
    // 3.
    FLASH_DEVICE bool has(int block, int lower, int query) const {
        return words_[block / 4] >> (8 * (block % 4) + 4 * lower + query) & 1;
    }

  private:
    static constexpr int kWords = ceil_div(kBlocks, 4);
    uint32_t words_[kWords];
};

}  // namespace flash
