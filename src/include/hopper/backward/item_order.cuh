// The order of a launch's items. They are numbered so that
//   - (batch, head) pairs are taken in sections of `section_heads`;
//   - inside a section the first tile of all heads comes before the second: whoever counts tiles from the
//   side
//     that visits most under a causal mask has the longest items first;
//   - of one tile, the heads of the section come one after another.
//
// Plain arithmetic, the same on host and device.
#pragma once

#include "common/cuda_utils.cuh"

namespace flash::hopper {

// Which tile of which pair; tiles and pairs are counted as they are taken.
struct ItemPlace {
    int tile, pair;
};

// Of item `number` of `pairs` pairs of n_tiles tiles each.
FLASH_HOST_DEVICE constexpr ItemPlace ordered_item(int number, int n_tiles, int pairs, int section_heads) {
    const int items_per_section = section_heads * n_tiles;
    const int section = number / items_per_section;
    const int in_section = number - section * items_per_section;
    const int width = min_of(section_heads, pairs - section * section_heads);
    const int tile = in_section / width;
    return {tile, section * section_heads + in_section - tile * width};
}

}  // namespace flash::hopper
