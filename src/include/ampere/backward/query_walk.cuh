// The tiles of queries that a block of keys visits: for each query head of its group those that see some key.
#pragma once

#include "common/backward/visible_rows.cuh"

namespace flash::ampere {

struct QueryWalk {
    Range tiles;  // of one head
    int n_heads;  // of the group
    int tile;
    int head;  // 0 … n_heads - 1

    FLASH_DEVICE QueryWalk(Range tiles, int n_heads)
        : tiles(tiles), n_heads(n_heads), tile(tiles.begin), head(tiles.begin < tiles.end ? 0 : n_heads) {}

    FLASH_DEVICE bool ended() const { return head >= n_heads; }
    FLASH_DEVICE void advance() {
        if (++tile == tiles.end) {
            tile = tiles.begin;
            ++head;
        }
    }

    // The visits some steps further or back: worked out where they are needed, so that loops carry one place.
    template <int kSteps>
    FLASH_DEVICE QueryWalk ahead() const {
        QueryWalk walk = *this;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) walk.advance();
        return walk;
    }
    template <int kSteps>
    FLASH_DEVICE QueryWalk back() const {
        QueryWalk walk = *this;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            if (walk.tile-- == tiles.begin) {
                walk.tile = tiles.end - 1;
                --walk.head;
            }
        }
        return walk;
    }
};

}  // namespace flash::ampere
