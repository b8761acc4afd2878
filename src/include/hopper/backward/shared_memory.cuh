// Addresses of everything in shared memory, and the barriers by which tiles are handed over.
//
// Every slot has a "full" barrier and an "empty" one. A K slot also carries its item:
//
//     K, V      a tile for a whole item
//     Q, rows   Q, LSE and delta of a query block; their slot is given back together with dO's
//     dO        waited for later than Q, and for itself
//     dS        written by every consumer warp, read by all for dQ
//     P         with split_gradients written by one warpgroup, read by the other
#pragma once

#include "hopper/backward/key_items.cuh"
#include "hopper/ptx_sm90.cuh"
#include "tma/rings.cuh"

namespace flash::hopper {

template <typename Kernel>
struct BackwardSharedMemory {
    static constexpr int kWarpArrivals = Kernel::n_consumer_warps * kArrivalsOfWarp;
    // Who reads an item besides the consumers: the row warp, and the warps that add dQ.
    static constexpr int kItemReaders = 1 + (Kernel::stages_dq ? Kernel::n_consumers : 0);
    static constexpr int kItemsOffset = 512, kKindsOffset = 704;
    enum Barrier : int {
        kKFull = 0,
        kKEmpty = kKFull + Kernel::k_stages,
        kVFull = kKEmpty + Kernel::k_stages,
        kVEmpty = kVFull + Kernel::v_stages,
        kQFull = kVEmpty + Kernel::v_stages,
        kDoFull = kQFull + Kernel::q_stages,
        kQEmpty = kDoFull + Kernel::q_stages,
        kDsFull = kQEmpty + Kernel::q_stages,
        kDsEmpty = kDsFull + Kernel::ds_stages,
        kPFull = kDsEmpty + Kernel::ds_stages,
        kPEmpty = kPFull + Kernel::p_stages,
        kBarriers = kPEmpty + Kernel::p_stages,
    };
    static_assert(kBarriers * 8 <= kItemsOffset &&
                  kItemsOffset + Kernel::k_stages * kItemBytes <= kKindsOffset &&
                  kKindsOffset + Kernel::q_stages * Kernel::n_consumers * 4 <= kBackwardControlBytes);

    uint32_t base;  // a multiple of 1024

    FLASH_DEVICE uint32_t k(uint32_t slot) const { return base + Kernel::smem_k + slot * Kernel::k_bytes; }
    FLASH_DEVICE uint32_t v(uint32_t slot) const { return base + Kernel::smem_v + slot * Kernel::v_bytes; }
    FLASH_DEVICE uint32_t q(uint32_t slot) const { return base + Kernel::smem_q + slot * Kernel::q_bytes; }
    FLASH_DEVICE uint32_t dout(uint32_t slot) const {
        return base + Kernel::smem_do + slot * Kernel::do_bytes;
    }
    FLASH_DEVICE uint32_t ds(uint32_t slot) const { return base + Kernel::smem_ds + slot * Kernel::ds_bytes; }
    FLASH_DEVICE uint32_t dq(int part) const {
        return base + Kernel::smem_dq + part * Kernel::dq_part_floats * 4;
    }
    FLASH_DEVICE uint32_t p(uint32_t slot) const { return base + Kernel::smem_p + slot * Kernel::p_bytes; }
    FLASH_DEVICE uint32_t lse(uint32_t slot) const {
        return base + Kernel::smem_lse + slot * Kernel::row_bytes;
    }
    FLASH_DEVICE uint32_t delta(uint32_t slot) const {
        return base + Kernel::smem_delta + slot * Kernel::row_bytes;
    }
    FLASH_DEVICE uint32_t diagonals(int warpgroup) const {
        return base + Kernel::smem_diagonals + warpgroup * Kernel::Diagonals::kBytes;
    }
    FLASH_DEVICE uint32_t item(uint32_t slot) const {
        return base + Kernel::smem_control + kItemsOffset + slot * kItemBytes;
    }
    // With a mask of the user's: what it leaves of a query block for the keys of a consumer warpgroup, a
    // TileKind. It comes and goes with Q.
    FLASH_DEVICE uint32_t kind(uint32_t slot, int warpgroup) const {
        return base + Kernel::smem_control + kKindsOffset + (slot * Kernel::n_consumers + warpgroup) * 4;
    }

    FLASH_DEVICE uint32_t k_full(uint32_t slot) const { return barrier(kKFull, slot); }
    FLASH_DEVICE uint32_t k_empty(uint32_t slot) const { return barrier(kKEmpty, slot); }
    FLASH_DEVICE uint32_t v_full(uint32_t slot) const { return barrier(kVFull, slot); }
    FLASH_DEVICE uint32_t v_empty(uint32_t slot) const { return barrier(kVEmpty, slot); }
    FLASH_DEVICE uint32_t q_full(uint32_t slot) const { return barrier(kQFull, slot); }
    FLASH_DEVICE uint32_t q_empty(uint32_t slot) const { return barrier(kQEmpty, slot); }
    FLASH_DEVICE uint32_t do_full(uint32_t slot) const { return barrier(kDoFull, slot); }
    FLASH_DEVICE uint32_t ds_full(uint32_t slot) const { return barrier(kDsFull, slot); }
    FLASH_DEVICE uint32_t ds_empty(uint32_t slot) const { return barrier(kDsEmpty, slot); }

    FLASH_DEVICE uint32_t p_full(uint32_t slot) const { return barrier(kPFull, slot); }
    FLASH_DEVICE uint32_t p_empty(uint32_t slot) const { return barrier(kPEmpty, slot); }

    // For Scheduler, which sends nothing here.
    FLASH_DEVICE uint32_t mail(uint32_t) const { return 0; }
    FLASH_DEVICE uint32_t mail_full(uint32_t) const { return 0; }

    // Called by all threads before any use.
    FLASH_DEVICE void initialise() const {
        if (threadIdx.x == 0) {
            for (int slot = 0; slot < Kernel::k_stages; ++slot) {
                mbarrier_init(k_full(slot), 1);
                mbarrier_init(k_empty(slot), kWarpArrivals + kItemReaders * kArrivalsOfWarp);
            }
            for (int slot = 0; slot < Kernel::v_stages; ++slot) {
                mbarrier_init(v_full(slot), 1);
                mbarrier_init(v_empty(slot), Kernel::split ? kWarpArrivals / 2 : kWarpArrivals);
            }
            for (int slot = 0; slot < Kernel::q_stages; ++slot) {
                mbarrier_init(q_full(slot), 1 + kArrivalsOfWarp);  // the copy's, and the row warp's
                mbarrier_init(do_full(slot), 1);
                mbarrier_init(q_empty(slot), kWarpArrivals);
            }
            for (int slot = 0; slot < Kernel::ds_stages; ++slot) {
                mbarrier_init(ds_full(slot), kWarpArrivals);
                mbarrier_init(ds_empty(slot), kWarpArrivals);
            }
            for (int slot = 0; slot < Kernel::p_stages; ++slot) {
                mbarrier_init(p_full(slot), kWarpArrivals / 2);
                mbarrier_init(p_empty(slot), kWarpArrivals / 2);
            }
            fence_mbarrier_init();
        }
        __syncthreads();  // no thread touches a barrier before it is initialised
    }

  private:
    FLASH_DEVICE uint32_t barrier(int first, uint32_t slot) const {
        return base + Kernel::smem_control + (first + slot) * 8;
    }
};

// Named barriers: of turns, and of the dQ tiles that are staged for a bulk reduction. 0 is __syncthreads.
namespace named_barrier {
inline constexpr int kTurn = 1;       // + consumer warpgroup
inline constexpr int kStaged = 3;     // + part: the tile is there
inline constexpr int kStageFree = 5;  // + part: it has been read
inline constexpr int kWarpgroup = 7;  // + consumer warpgroup
}  // namespace named_barrier

}  // namespace flash::hopper
