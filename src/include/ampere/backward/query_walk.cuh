// The tiles of queries that a block of keys visits: from the last to the first, each for every query head of
// the group.
//
// Of a causal mask all blocks of keys begin at the last tile, and those with higher numbers end earlier; of a
// window those with higher numbers are further behind. So whoever adds to a tile before another, in the order
// of ordered sums, comes there no later than the other does.
#pragma once

#include "common/backward/visible_rows.cuh"

namespace flash::ampere {

struct QueryWalk {
    int first_tile;
    int n_heads;  // of the group
    int tile;
    int head;  // 0 … n_heads - 1

    FLASH_HOST_DEVICE constexpr QueryWalk(Range tiles, int n_heads)
        : first_tile(tiles.begin), n_heads(n_heads), tile(tiles.end - 1), head(0) {}

    FLASH_HOST_DEVICE constexpr bool ended() const { return tile < first_tile; }
    FLASH_HOST_DEVICE constexpr void advance() {
        if (++head == n_heads) {
            head = 0;
            --tile;
        }
    }

    // The visits some steps further or back: worked out where they are needed, so that loops carry one place.
    template <int kSteps>
    FLASH_HOST_DEVICE constexpr QueryWalk ahead() const {
        QueryWalk walk = *this;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) walk.advance();
        return walk;
    }
    template <int kSteps>
    FLASH_HOST_DEVICE constexpr QueryWalk back() const {
        QueryWalk walk = *this;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            if (walk.head-- == 0) {
                walk.head = n_heads - 1;
                ++walk.tile;
            }
        }
        return walk;
    }
};

}  // namespace flash::ampere
