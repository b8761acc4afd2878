// What bounds of a mask over a tile say of the tile.
#include "check.h"
#include "common/tile_kind.cuh"

int main() {
    using flash::TileKind;
    CHECK(flash::tile_kind({false, false}) == TileKind::EMPTY);
    CHECK(flash::tile_kind({false, true}) == TileKind::PARTIAL);
    CHECK(flash::tile_kind({true, true}) == TileKind::FULL);
    // A causal mask over tiles of 64 queries and 64 keys: empty above the diagonal, full below it.
    using flash::mods::at_most;
    using flash::mods::Range;
    for (int q_block = 0; q_block < 4; ++q_block)
        for (int kv_block = 0; kv_block < 4; ++kv_block) {
            const Range<int> queries{64 * q_block, 64 * q_block + 63},
                keys{64 * kv_block, 64 * kv_block + 63};
            const TileKind expected = kv_block > q_block   ? TileKind::EMPTY
                                      : kv_block < q_block ? TileKind::FULL
                                                           : TileKind::PARTIAL;
            CHECK(flash::tile_kind(at_most(keys, queries)) == expected);
        }
    return report();
}
