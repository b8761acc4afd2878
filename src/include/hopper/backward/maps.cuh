// The tensor maps as kernels have them, and the copies of tiles of keys and of queries.
#pragma once

#include "common/swizzling.cuh"
#include "hopper/backward/items.cuh"
#include "tma/ptx_tma.cuh"

namespace flash::hopper {

struct BackwardMaps {
    const CUtensorMap &q, &k, &v, &dout;
};

// Rows past the sequence's end, and columns past the tensor's, arrive as zeros.
template <typename Kernel>
struct TileLoads {
    const BackwardKernelArgs &args;
    const uint64_t policy = evict_last_policy();

    // (B_c, columns) of K or V; panels begin every `step` columns.
    template <int columns, int step = kPanelColumns>
    FLASH_DEVICE void keys(uint32_t address, const CUtensorMap &map, uint32_t barrier,
                           const BackwardItem &item, int head, int tile) const {
        load<columns, Kernel::B_c, step>(address, map, barrier, args.cu_seqlens_k != nullptr, item, head,
                                         tile * Kernel::B_c, args.seq_len_k - item.seq_len_k,
                                         item.k_row + item.seq_len_k);
    }

    // (B_r, columns) of Q or dO.
    template <int columns>
    FLASH_DEVICE void queries(uint32_t address, const CUtensorMap &map, uint32_t barrier,
                              const BackwardItem &item, int head, int block) const {
        load<columns, Kernel::B_r, kPanelColumns>(address, map, barrier, args.cu_seqlens_q != nullptr, item,
                                                  head, block * Kernel::B_r, args.seq_len_q - item.seq_len_q,
                                                  item.q_row + item.seq_len_q);
    }

  private:
    // `shift` and `end`: where a ragged map has the rows of the sequence (tensor_view.cuh).
    template <int columns, int rows, int step>
    FLASH_DEVICE void load(uint32_t address, const CUtensorMap &map, uint32_t barrier, bool packed,
                           const BackwardItem &item, int head, int row, int shift, int end) const {
#pragma unroll
        for (int panel = 0; panel < panel_count(columns); ++panel) {
            const uint32_t to = address + panel * rows * kPanelRowBytes;
            if constexpr (Kernel::traits.varlen) {
                tma_load(to, &map, barrier, panel * step, shift + row, end, head, packed ? 0 : item.batch,
                         policy);
            } else {
                tma_load(to, &map, barrier, panel * step, row, head, item.batch, policy);
            }
        }
    }
};

}  // namespace flash::hopper
