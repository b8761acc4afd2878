// Positions in the rings through which tiles pass from a producer to its consumers.
//
// Every slot of a ring has a "full" barrier and an "empty" one. Both sides count the slots that they have
// passed: that number says which slot is next, and the parity of the phase to wait for.
#pragma once

#include "common/cuda_utils.cuh"

namespace flash::tma {

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

}  // namespace flash::tma
