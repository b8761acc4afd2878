// How the load thread tells the consumers which tiles a mod's mask leaves something of: in the control block
// of shared memory, two words beside each K slot. Visible once the slot's k_full barrier is passed, until the
// slot is freed. So the consumers, whose registers are full, look at no bounds and no bits.
#pragma once

#include "common/mod_tiles.cuh"
#include "hopper/forward/pipeline.cuh"

namespace flash::hopper {

// What the mask leaves of the tile in the slot for each consumer warpgroup, and the number of the tile that
// is visited behind it.
template <typename Kernel>
FLASH_DEVICE void write_tile(const SharedMemory<Kernel> &smem, uint32_t k_slot, TileKinds kinds, int next) {
    store_shared_pair(smem.tile(k_slot), kinds.bits, static_cast<uint32_t>(next));
}

struct TileWords {
    TileKind kind;  // for the warpgroup
    int next;
};

// Through shuffles, so that the compiler knows them to be the same in the whole warp: loops end by them.
template <typename Kernel>
FLASH_DEVICE TileWords read_tile(const SharedMemory<Kernel> &smem, uint32_t k_slot, int warpgroup) {
    const TileKinds kinds{static_cast<uint32_t>(load_shared_int(smem.tile(k_slot)))};
    const int next = load_shared_int(smem.tile(k_slot) + 4);
    return {static_cast<TileKind>(__shfl_sync(kAllLanes, static_cast<int>(kinds.of(warpgroup)), 0)),
            __shfl_sync(kAllLanes, next, 0)};
}

}  // namespace flash::hopper
