// In which order a thread block takes its blocks of B_c keys: from the last visible one to the first
// (mask.cuh), in up to three loops, so that only blocks that need a mask are masked:
//
//     K/V block   begin  …           full_begin  …       full_end  …      end - 1
//                 |← general (window) |←──── no mask ───|←── general ───────────| start here
//
// General blocks have a mask where one is needed, and take the softmax's reference from their maximum; a
// reference that is not the maximum (softmax.cuh) is therefore good for every row when the steady blocks
// begin.
//
// With chunks of keys (common/chunks.cuh) the loops go from a chunk's last block to its first. Between two
// chunks rows begin anew, outside of the loops, which are those of a kernel without chunks.
#pragma once

#include "ampere/forward/kept_rows.cuh"
#include "ampere/forward/warp.cuh"

namespace flash::ampere {

// The blocks from `kv_block` down to `first`, which is that of `blocks`, or of a chunk.
template <typename Kernel>
FLASH_DEVICE void visit_blocks(ForwardWarp<Kernel> &state, const KeyBlocks &blocks, int first,
                               int &kv_block) {
    constexpr bool chunks = Kernel::chunk_tiles > 0;
    const int full_end = chunks ? max_of(blocks.full_end, first) : blocks.full_end;
    const int full_begin = chunks ? max_of(blocks.full_begin, first) : blocks.full_begin;
#pragma unroll 1
    for (; kv_block >= full_end; kv_block = state.walk.behind(kv_block)) {
        state.template process_kv_block<true>(kv_block);
    }
#pragma unroll 1
    for (; kv_block >= full_begin; kv_block = state.walk.behind(kv_block)) {
        state.template process_kv_block<false>(kv_block);
    }
    if constexpr (Kernel::traits.window) {
#pragma unroll 1
        for (; kv_block >= first; kv_block = state.walk.behind(kv_block)) {
            state.template process_kv_block<true>(kv_block);
        }
    }
}

// The blocks of a thread block, where a chunk's end finds them.
FLASH_DEVICE volatile KeyBlocks &shared_blocks() {
    __shared__ KeyBlocks blocks;
    return blocks;
}

// All blocks from `kv_block`, the last one, down; the first are under way.
template <typename Kernel>
FLASH_DEVICE void visit_all_blocks(ForwardWarp<Kernel> &state, const ForwardKernelArgs &args,
                                   const KeyBlocks &blocks, int kv_block) {
    if constexpr (Kernel::chunk_tiles == 0) {
        visit_blocks(state, blocks, blocks.begin, kv_block);
    } else {
        constexpr int kTiles = Kernel::chunk_tiles;
        volatile KeyBlocks &all = shared_blocks();
        if (threadIdx.x == 0) {
            all.begin = blocks.begin;
            all.full_begin = blocks.full_begin;
            all.full_end = blocks.full_end;
            all.end = blocks.end;
        }
        __syncthreads();
#pragma unroll 1
        for (;;) {
            const KeyBlocks of_chunk{all.begin, all.full_begin, all.full_end, 0};
            visit_blocks(state, of_chunk, max_of(of_chunk.begin, kv_block / kTiles * kTiles), kv_block);
            const bool has_kept = (all.end - 1) / kTiles > (kv_block + 1) / kTiles;
            if (has_kept && state.has_rows()) KeptRows<Kernel>(args).join(state.O, state.softmax);
            if (kv_block < all.begin) break;
            if (state.has_rows()) KeptRows<Kernel>(args).keep(state.O, state.softmax);
        }
    }
    state.complete_sums();
}

}  // namespace flash::ampere
