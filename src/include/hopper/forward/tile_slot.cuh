// How the load thread tells the consumers which tiles a mod's mask leaves something of: in the control block
// of shared memory, a word beside each K slot. Visible once the slot's k_full barrier is passed, until the
// slot is freed. So the consumers, whose registers are full, look at no bounds and no bits.
#pragma once

#include "common/mod_tiles.cuh"
#include "hopper/forward/pipeline.cuh"

namespace flash::hopper {

// What the mask leaves of the tile in the slot, and the number of the tile that is visited behind it.
template <typename Kernel>
FLASH_DEVICE void write_tile(const SharedMemory<Kernel> &smem, uint32_t k_slot, TileKind kind, int next) {
    store_shared(smem.tile(k_slot), static_cast<uint32_t>(next << 2 | static_cast<int>(kind)));
}

struct TileWord {
    int word;

    FLASH_DEVICE TileKind kind() const { return static_cast<TileKind>(word & 3); }
    FLASH_DEVICE int next() const { return word >> 2; }
};

// Through a shuffle, so that the compiler knows it to be the same in the whole warp: loops end by it.
template <typename Kernel>
FLASH_DEVICE TileWord read_tile(const SharedMemory<Kernel> &smem, uint32_t k_slot) {
    return {__shfl_sync(kAllLanes, load_shared_int(smem.tile(k_slot)), 0)};
}

}  // namespace flash::hopper
