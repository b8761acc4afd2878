// The rings through which tiles pass from the producer to the consumers, and their mbarriers.
//
// Every slot has a "full" barrier (the tile is there; the producer arrives and announces its bytes) and an
// "empty" one (the tile may be overwritten; every consumer warp arrives). K and V have rings of their own,
// so that S = Q K^T of the next tile never waits for the next V. A Q slot also carries its work item, and,
// where O is staged in it, a third barrier: "stored" is complete when all warps have written their part of O.
//
//     producer    wait empty -> announce bytes -> copy ............ full
//     consumers                                  wait full -> wgmma -> arrive empty
#pragma once

#include "hopper/forward/static_kernel_configuration.cuh"
#include "hopper/ptx_sm90.cuh"

namespace flash::hopper {

// A position in a ring of kSlots, as the number of slots passed: one register. `phase` is the parity to wait
// for. Consumers start in phase 0; the producer starts in phase 1, so that its first wait on each fresh
// "empty" barrier returns at once.
template <int kSlots>
struct RingPosition {
    uint32_t passed;

    FLASH_DEVICE explicit RingPosition(uint32_t first_phase) : passed(first_phase * kSlots) {}

    FLASH_DEVICE uint32_t slot() const { return passed % kSlots; }
    FLASH_DEVICE uint32_t phase() const { return passed / kSlots & 1; }
    FLASH_DEVICE void advance() { ++passed; }
};

// A consumer's position in the rings of K and V: the number of tiles passed.
template <int kKStages, int kVStages>
struct TilePosition {
    uint32_t passed = 0;

    FLASH_DEVICE uint32_t k_slot() const { return passed % kKStages; }
    FLASH_DEVICE uint32_t k_phase() const { return passed / kKStages & 1; }
    FLASH_DEVICE uint32_t v_slot() const { return passed % kVStages; }
    FLASH_DEVICE uint32_t v_phase() const { return passed / kVStages & 1; }
    FLASH_DEVICE void advance() { ++passed; }
};

// Addresses of everything in shared memory.
template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
struct SharedMemory {
    using Static = StaticForwardKernelConfig<CFG, TRAITS>;
    static constexpr int kBarrierBytes = 8;
    static constexpr int kItemsOffset = 512;
    static constexpr int kSinkOffset = 704;
    static constexpr int kMailOffset = 768;
    static constexpr int kFirstK = 3 * Static::kQStages;  // barriers
    static constexpr int kFirstV = kFirstK + 2 * Static::kKStages;
    static constexpr int kWarpArrivals = Static::n_consumer_warps * kArrivalsOfWarp;
    static constexpr int kTileArrivals =
        kWarpArrivals * (Static::kPaired ? 2 : 1);  // both blocks read a tile
    static constexpr int kFirstMail = kFirstV + 2 * Static::kVStages;
    static_assert((kFirstMail + Static::kMailSlots) * kBarrierBytes <= kItemsOffset);
    static_assert(kMailOffset + Static::kMailSlots * 4 <= kControlBytes);
    static constexpr int kItemBytes = TRAITS.split ? 48 : Static::kLongItems ? 32 : 16;
    static_assert(kItemsOffset + Static::kQStages * kItemBytes <= kSinkOffset);

    uint32_t base;  // a multiple of 1024

    FLASH_DEVICE uint32_t q(uint32_t slot) const { return base + Static::kQOffset + slot * Static::kQBytes; }
    FLASH_DEVICE uint32_t k(uint32_t slot) const { return base + Static::kKOffset + slot * Static::kKBytes; }
    FLASH_DEVICE uint32_t v(uint32_t slot) const { return base + Static::kVOffset + slot * Static::kVBytes; }

    FLASH_DEVICE uint32_t q_full(uint32_t slot) const { return barrier(0, slot); }
    FLASH_DEVICE uint32_t q_empty(uint32_t slot) const { return barrier(Static::kQStages, slot); }
    FLASH_DEVICE uint32_t o_staged(uint32_t slot) const { return barrier(2 * Static::kQStages, slot); }
    FLASH_DEVICE uint32_t k_full(uint32_t slot) const { return barrier(kFirstK, slot); }
    FLASH_DEVICE uint32_t k_empty(uint32_t slot) const { return barrier(kFirstK + Static::kKStages, slot); }
    FLASH_DEVICE uint32_t v_full(uint32_t slot) const { return barrier(kFirstV, slot); }
    FLASH_DEVICE uint32_t v_empty(uint32_t slot) const { return barrier(kFirstV + Static::kVStages, slot); }

    FLASH_DEVICE uint32_t item(uint32_t slot) const {
        return base + Static::kControlOffset + kItemsOffset + slot * kItemBytes;
    }
    // Numbers of items that the other block of a pair sends, and the barriers that say they are there.
    FLASH_DEVICE uint32_t mail(uint32_t slot) const {
        return base + Static::kControlOffset + kMailOffset + slot * 4;
    }
    FLASH_DEVICE uint32_t mail_full(uint32_t slot) const { return barrier(kFirstMail, slot); }
    // A word that is written for the compiler's eyes only: see Consumer::await_pv.
    FLASH_DEVICE uint32_t sink() const { return base + Static::kControlOffset + kSinkOffset; }

    // Called by all threads before any use.
    FLASH_DEVICE void initialise() const {
        if (threadIdx.x == 0) {
            for (int slot = 0; slot < Static::kQStages; ++slot) {
                mbarrier_init(q_full(slot), 1);
                // Freed by the consumers, or by the store thread once O has left the slot.
                mbarrier_init(q_empty(slot), Static::kDirectStore ? kWarpArrivals : 1);
                mbarrier_init(o_staged(slot), kWarpArrivals);
            }
            for (int slot = 0; slot < Static::kKStages; ++slot) {
                mbarrier_init(k_full(slot), 1);
                mbarrier_init(k_empty(slot), kTileArrivals);
            }
            for (int slot = 0; slot < Static::kVStages; ++slot) {
                mbarrier_init(v_full(slot), 1);
                mbarrier_init(v_empty(slot), kTileArrivals);
            }
            for (int slot = 0; slot < Static::kMailSlots; ++slot) mbarrier_init(mail_full(slot), 1);
            fence_mbarrier_init();
        }
        __syncthreads();                      // no thread touches a barrier before it is initialised
        if (Static::kPaired) cluster_sync();  // ... of the other block either
    }

  private:
    FLASH_DEVICE uint32_t barrier(int first, uint32_t slot) const {
        return base + Static::kControlOffset + (first + slot) * kBarrierBytes;
    }
};

}  // namespace flash::hopper
