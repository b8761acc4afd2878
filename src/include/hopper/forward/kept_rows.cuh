// What becomes of a warpgroup's rows where a chunk of keys ends, and where an item of several chunks ends:
// what they have left is kept, and joined with what is kept.
#pragma once

#include "hopper/forward/chunk_sums.cuh"

namespace flash::hopper {

// Stands for a row state that lies in shared memory.
struct PutAside {};

// Consumer: what derives from it, with TileRange's members, a softmax, O and the item in hand.
template <typename Kernel, typename Consumer>
struct KeptRows {
    // The row state, until O is there and the next tile's softmax has been. With chunks of keys that leaves
    // no registers for it: it lies in shared memory, if there is room. (Beside a wider O the registers lack
    // where chunks are joined.)
    static constexpr bool kPutsAside = Kernel::kept_slots > 0 && Kernel::d_head_v <= 128;
    FLASH_DEVICE auto put_aside() const {
        if constexpr (kPutsAside) {
            sums().put_aside(self().row_state());
            return PutAside{};
        } else {
            return self().row_state();
        }
    }
    FLASH_DEVICE RowState aside() const {
        if constexpr (kPutsAside) return sums().aside();
        return self().row_state();
    }

    // What the chunk before the one in hand has left goes to memory, joined with what is there. O begins
    // anew.
    FLASH_DEVICE void keep_sums(RowState ended) {
        if constexpr (Kernel::chunk_tiles > 0) {
            join_kept_sums(ended, self().item, self().kv_block + 1);
            sums().store(self().rmem_O, ended);
            self().zero_output();
        }
    }
    FLASH_DEVICE void keep_sums(const PutAside &) { keep_sums(aside()); }

    // What is kept of the chunks of `item` before that of a tile, into O and `state` of that one.
    FLASH_DEVICE void join_kept_sums(RowState &state, const ItemOf<Kernel> &item, int kv_block) {
        if constexpr (Kernel::chunk_tiles > 0) {
            take_sums();
            if (!self().has_kept_sums(item, kv_block)) return;
            sums().join(self().rmem_O, state, self().args.exponent_factor);
        }
    }

  private:
    // ptxas would put the sums of the tile in hand behind what follows, and its P would hold registers until
    // then, unless a branch that depends on them stands here. No finite sum takes it.
    FLASH_DEVICE void take_sums() const {
        const auto &softmax = self().softmax;
        if (fmaxf(softmax.sum[0], softmax.sum[1]) > 1e36f) store_shared(self().smem.sink(), 1);
    }

    FLASH_DEVICE ChunkSums<Kernel> sums() const { return {self().args, self().smem, self().warpgroup}; }
    FLASH_DEVICE Consumer &self() { return static_cast<Consumer &>(*this); }
    FLASH_DEVICE const Consumer &self() const { return static_cast<const Consumer &>(*this); }
};

}  // namespace flash::hopper
