// Which tiles of its item a consumer warpgroup works on, and which of them need a mask. Tiles go from the
// last to the first:
//
//     end_of_loops()  …  first_whole_block()  …  last_masked_block()  …  leading_kv_block()  …
//     item.end_kv_block - 1 |←- left edge ---->|←--- no mask ------>|←--- right edge
//     --------------------->|←--- skipped --------------->|
#pragma once

#include "hopper/forward/kernel_args.cuh"
#include "hopper/forward/static_kernel_configuration.cuh"

namespace flash::hopper {

// Consumer: what derives from it and has `args`, `item` and `warpgroup`.
template <typename Kernel, typename Consumer>
struct TileRange {
    static constexpr int B_r = Kernel::B_r, B_c = Kernel::B_c;

    FLASH_DEVICE int seq_len_q() const { return seq_len_q(self().item); }
    FLASH_DEVICE int seq_len_k() const { return seq_len_k(self().item); }
    FLASH_DEVICE int seq_len_q(const ItemOf<Kernel> &item) const {
        return Kernel::traits.varlen ? item.seq_len_q : self().args.work.seq_len_q;
    }
    FLASH_DEVICE int seq_len_k(const ItemOf<Kernel> &item) const {
        return Kernel::traits.varlen ? item.seq_len_k : self().args.work.seq_len_k;
    }
    FLASH_DEVICE Mask<Kernel::traits> mask() const {
        return self().args.template mask<Kernel::traits>(seq_len_q(), seq_len_k());
    }
    FLASH_DEVICE int first_row() const {
        return self().item.q_block * B_r + self().warpgroup * kWarpgroupRows;
    }

    // The query of row `row` of the item's block.
    FLASH_DEVICE int query_of(int row) const {
        if constexpr (Kernel::traits.planned) {
            const PlannedLaunch &planned = self().args.planned;
            return self().item.q_block * planned.block_queries + planned.by_group.divide(row);
        } else {
            return self().item.q_block * B_r + row;
        }
    }
    // That of the warpgroup's first row.
    FLASH_DEVICE int first_query() const {
        if constexpr (Kernel::traits.planned) {
            return query_of(self().warpgroup * kWarpgroupRows);
        } else {
            return first_row();
        }
    }

    // Masks of the right edge end at this tile: the first row of the warpgroup sees all columns of those
    // before it, and one of this one. So every row has met a key before the steady loop, and a lagged
    // reference is one of its scores.
    FLASH_DEVICE int last_masked_block() const {
        int right = Kernel::traits.window ? self().args.window_right : 0;
        if constexpr (Kernel::traits.causal) right = min(right, 0);
        return max(end_of_loops(), (first_query() + seq_len_k() - seq_len_q() + right) / B_c);
    }

    // Masks of the left edge begin before this tile.
    FLASH_DEVICE int first_whole_block() const {
        if constexpr (!Kernel::traits.window) return end_of_loops();
        int last_row = min(first_row() + kWarpgroupRows, seq_len_q()) - 1;
        if constexpr (Kernel::traits.planned) {
            last_row = min(query_of(self().warpgroup * kWarpgroupRows + kWarpgroupRows - 1), seq_len_q() - 1);
        }
        return max(end_of_loops(), ceil_div(mask().visible_begin(last_row), B_c));
    }

    // Of a tile behind the item's first.
    FLASH_DEVICE bool needs_mask(int kv_block) const {
        return (Kernel::masks_diagonal && kv_block >= last_masked_block()) ||
               (Kernel::traits.window && kv_block < first_whole_block());
    }

    // Tiles of an item go from the last to this one.
    FLASH_DEVICE int last_block() const { return last_block(self().item); }
    FLASH_DEVICE int last_block(const ItemOf<Kernel> &item) const {
        return Kernel::tiles_begin ? item.first_kv_block : 0;
    }

    // ... and those of a chunk of keys, of which an item may have several, to this one.
    FLASH_DEVICE int end_of_loops() const {
        if constexpr (Kernel::chunk_tiles > 0) return self().chunks.end_of_loops;
        return last_block();
    }
    // Of the chunk that a tile is in.
    FLASH_DEVICE int end_of_chunk(int kv_block) const {
        constexpr int kTiles = max_of(Kernel::chunk_tiles, 1);
        return max(last_block(), kv_block / kTiles * kTiles);
    }

    // The first tile of an item that the warpgroup works on. Under a causal mask it may skip the first tiles.
    FLASH_DEVICE int leading_kv_block() const {
        return leading_kv_block(self().item, self().item.end_kv_block);
    }
    FLASH_DEVICE int leading_kv_block(const ItemOf<Kernel> &item, int end_kv_block) const {
        int n_blocks = end_kv_block;
        if (Kernel::max_skipped_tiles > 0) {
            const int first = item.q_block * B_r + self().warpgroup * kWarpgroupRows;
            const int visible = first + kWarpgroupRows + seq_len_k(item) - seq_len_q(item);
            n_blocks = min(n_blocks, max((visible + B_c - 1) / B_c, 1));
            n_blocks = max(n_blocks, end_kv_block - Kernel::max_skipped_tiles);
        }
        return n_blocks - 1;
    }

    // One past the last tile of an item, as its slot says it. Of paired blocks the one with the lower queries
    // has fewer.
    FLASH_DEVICE int end_kv_block(const ItemOf<Kernel> &item) const {
        if constexpr (!Kernel::passes_tiles) return item.end_kv_block;
        const int visible = (item.q_block + 1) * B_r + seq_len_k(item) - seq_len_q(item);
        return min(item.end_kv_block, max(ceil_div(visible, B_c), 1));
    }

    // Of the warpgroup's chunks of keys of an item, whether there is one before that of a tile.
    FLASH_DEVICE bool has_kept_sums(const ItemOf<Kernel> &item, int kv_block) const {
        constexpr int kTiles = max_of(Kernel::chunk_tiles, 1);
        return Kernel::chunk_tiles > 0 &&
               leading_kv_block(item, end_kv_block(item)) / kTiles > kv_block / kTiles;
    }

    // Whether the warpgroup sees nothing of the second half of its first tile.
    FLASH_DEVICE bool sees_half_tile(int kv_block) const {
        const int visible = first_row() + kWarpgroupRows + seq_len_k() - seq_len_q();
        return visible <= kv_block * B_c + B_c / 2;
    }

  private:
    FLASH_DEVICE const Consumer &self() const { return static_cast<const Consumer &>(*this); }
};

}  // namespace flash::hopper
