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
#include "tma/rings.cuh"

namespace flash::hopper {

// Addresses of everything in shared memory.
template <typename Kernel>
struct SharedMemory {
    static constexpr int kBarrierBytes = 8;
    static constexpr int kItemsOffset = 512;
    static constexpr int kSinkOffset = 704;
    static constexpr int kTilesOffset = 720;
    static constexpr int kMailOffset = 768;
    static constexpr int kFirstK = 3 * Kernel::q_stages;  // barriers
    static constexpr int kFirstV = kFirstK + 2 * Kernel::k_stages;
    static constexpr int kWarpArrivals = Kernel::n_consumer_warps * kArrivalsOfWarp;
    static constexpr int kTileArrivals =
        kWarpArrivals * (Kernel::paired_blocks ? 2 : 1);  // both blocks read a tile
    static constexpr int kFirstMail = kFirstV + 2 * Kernel::v_stages;
    // Of the warps that leave what scores begin at beside a K tile.
    static constexpr int kDiagonalArrivals =
        Kernel::begins_scores ? Kernel::kDiagonalWarps * kArrivalsOfWarp : 0;
    // Planned items on their way from the warp that finds them to the load thread.
    static constexpr int kFoundSlots = Kernel::traits.planned ? 1 : 0;
    static constexpr int kFoundBytes = 64;
    static constexpr int kFirstFound = kFirstMail + Kernel::mail_slots;
    static constexpr int kFirstStreamed = kFirstFound + 2 * kFoundSlots;
    static constexpr int kStreamedSlots = Kernel::n_consumers * Kernel::streamed_stages;
    static_assert((kFirstStreamed + 2 * kStreamedSlots) * kBarrierBytes <= kItemsOffset);
    static_assert(!Kernel::mod_hides_keys || (Kernel::mail_slots + kFoundSlots == 0 &&
                                              kTilesOffset + Kernel::k_stages * 8 <= kControlBytes));
    static_assert(kMailOffset + Kernel::mail_slots * 4 <= kControlBytes);
    static_assert(kMailOffset + kFoundSlots * kFoundBytes <= kControlBytes);
    static constexpr int kItemBytes = Kernel::traits.planned ? 64
                                      : Kernel::traits.split ? 48
                                      : Kernel::long_items   ? 32
                                                             : 16;
    static_assert(kItemsOffset + Kernel::q_stages * kItemBytes <= kSinkOffset);

    uint32_t base;  // a multiple of 1024

    FLASH_DEVICE uint32_t q(uint32_t slot) const { return base + Kernel::smem_q + slot * Kernel::q_bytes; }
    FLASH_DEVICE uint32_t k(uint32_t slot) const { return base + Kernel::smem_k + slot * Kernel::k_bytes; }
    FLASH_DEVICE uint32_t v(uint32_t slot) const { return base + Kernel::smem_v + slot * Kernel::v_bytes; }

    FLASH_DEVICE uint32_t diagonals(uint32_t k_slot) const {
        return base + Kernel::smem_diagonals + k_slot * Kernel::Diagonals::kBytes;
    }

    FLASH_DEVICE uint32_t q_full(uint32_t slot) const { return barrier(0, slot); }
    FLASH_DEVICE uint32_t q_empty(uint32_t slot) const { return barrier(Kernel::q_stages, slot); }
    FLASH_DEVICE uint32_t o_staged(uint32_t slot) const { return barrier(2 * Kernel::q_stages, slot); }
    FLASH_DEVICE uint32_t k_full(uint32_t slot) const { return barrier(kFirstK, slot); }
    FLASH_DEVICE uint32_t k_empty(uint32_t slot) const { return barrier(kFirstK + Kernel::k_stages, slot); }
    FLASH_DEVICE uint32_t v_full(uint32_t slot) const { return barrier(kFirstV, slot); }
    FLASH_DEVICE uint32_t v_empty(uint32_t slot) const { return barrier(kFirstV + Kernel::v_stages, slot); }

    FLASH_DEVICE uint32_t item(uint32_t slot) const {
        return base + Kernel::smem_control + kItemsOffset + slot * kItemBytes;
    }
    // Numbers of items that the other block of a pair sends, and the barriers that say they are there.
    FLASH_DEVICE uint32_t mail(uint32_t slot) const {
        return base + Kernel::smem_control + kMailOffset + slot * 4;
    }
    FLASH_DEVICE uint32_t mail_full(uint32_t slot) const { return barrier(kFirstMail, slot); }
    FLASH_DEVICE uint32_t found(uint32_t slot) const {
        return base + Kernel::smem_control + kMailOffset + slot * kFoundBytes;
    }
    FLASH_DEVICE uint32_t found_full(uint32_t slot) const { return barrier(kFirstFound, slot); }
    FLASH_DEVICE uint32_t found_empty(uint32_t slot) const {
        return barrier(kFirstFound + kFoundSlots, slot);
    }
    // Of a warpgroup's tiles of a captured tensor (streamed_tiles.cuh).
    FLASH_DEVICE uint32_t streamed(int warpgroup, uint32_t slot) const {
        return base + Kernel::smem_streamed + streamed_slot(warpgroup, slot) * Kernel::streamed_bytes;
    }
    FLASH_DEVICE uint32_t streamed_full(int warpgroup, uint32_t slot) const {
        return barrier(kFirstStreamed, streamed_slot(warpgroup, slot));
    }
    FLASH_DEVICE uint32_t streamed_empty(int warpgroup, uint32_t slot) const {
        return barrier(kFirstStreamed + kStreamedSlots, streamed_slot(warpgroup, slot));
    }
    // Of a warpgroup, what chunks of keys have left (chunk_sums.cuh).
    FLASH_DEVICE uint32_t kept(int warpgroup) const {
        constexpr int kBytes = Kernel::kept_slots * Kernel::kept_slot_bytes / Kernel::n_consumers;
        return base + Kernel::smem_kept + warpgroup * kBytes;
    }
    // With a mod that hides keys: the tile in a K slot and the one behind it (tile_slot.cuh).
    FLASH_DEVICE uint32_t tile(uint32_t k_slot) const {
        return base + Kernel::smem_control + kTilesOffset + k_slot * 8;
    }
    // A word that is written for the compiler's eyes only: see Consumer::await_pv.
    FLASH_DEVICE uint32_t sink() const { return base + Kernel::smem_control + kSinkOffset; }

    // Called by all threads before any use.
    FLASH_DEVICE void initialise() const {
        if (threadIdx.x == 0) {
            for (int slot = 0; slot < Kernel::q_stages; ++slot) {
                mbarrier_init(q_full(slot), 1);
                // Freed by the consumers, or by the store thread once O has left the slot.
                mbarrier_init(q_empty(slot), Kernel::direct_store ? kWarpArrivals : 1);
                mbarrier_init(o_staged(slot), kWarpArrivals);
            }
            for (int slot = 0; slot < Kernel::k_stages; ++slot) {
                mbarrier_init(k_full(slot), 1 + kDiagonalArrivals);
                mbarrier_init(k_empty(slot), kTileArrivals);
            }
            for (int slot = 0; slot < Kernel::v_stages; ++slot) {
                mbarrier_init(v_full(slot), 1);
                mbarrier_init(v_empty(slot), kTileArrivals);
            }
            for (int slot = 0; slot < Kernel::mail_slots; ++slot) mbarrier_init(mail_full(slot), 1);
            for (int slot = 0; slot < kFoundSlots; ++slot) {
                mbarrier_init(found_full(slot), 1);
                mbarrier_init(found_empty(slot), Kernel::traits.paged ? kArrivalsOfWarp : 1);
            }
            for (int slot = 0; slot < kStreamedSlots; ++slot) {
                mbarrier_init(barrier(kFirstStreamed, slot), 1);
                mbarrier_init(barrier(kFirstStreamed + kStreamedSlots, slot),
                              kWarpsPerWarpgroup * kArrivalsOfWarp);
            }
            fence_mbarrier_init();
        }
        __syncthreads();                            // no thread touches a barrier before it is initialised
        if (Kernel::paired_blocks) cluster_sync();  // ... of the other block either
    }

  private:
    FLASH_DEVICE static uint32_t streamed_slot(int warpgroup, uint32_t slot) {
        return warpgroup * Kernel::streamed_stages + slot;
    }
    FLASH_DEVICE uint32_t barrier(int first, uint32_t slot) const {
        return base + Kernel::smem_control + (first + slot) * kBarrierBytes;
    }
};

}  // namespace flash::hopper
