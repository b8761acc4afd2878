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

    FLASH_DEVICE bool ended() const { return head == n_heads; }
    FLASH_DEVICE void advance() {
        if (++tile == tiles.end) {
            tile = tiles.begin;
            ++head;
        }
    }
};

}  // namespace flash::ampere
