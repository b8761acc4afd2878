// Who waits for whom: barriers in shared memory, so that warps drift apart as far as their data allows.
//
//     full K, V              copied                            each once
//     full Q, dO [stage]     copied
//     empty Q, dO [stage]    read by all warps for the last time
//     full P [group]         a group's score warps have left P^T for its gradient warps (and for each other)
//     empty P [group]        ... which have taken it
//     full dS [slot]         all gradient warps have left their dS^T
//     empty dS [slot]        all that make dQ of it, and pairs that make dK of it, have read it
#pragma once

#include "ampere/backward/static_kernel_configuration.cuh"
#include "common/ptx.cuh"

namespace flash::ampere {

// A slot of a ring and the parity of the phase in which it is used now.
template <int kSlots>
struct RingPlace {
    int slot = 0;
    uint32_t parity = 0;

    FLASH_DEVICE void advance() {
        if constexpr (kSlots == 1) {
            parity ^= 1;
        } else {
            slot = slot + 1 == kSlots ? 0 : slot + 1;
            parity ^= slot == 0;
        }
    }

    template <int kSteps>
    FLASH_DEVICE RingPlace ahead() const {
        RingPlace place = *this;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) place.advance();
        return place;
    }
};

template <typename Kernel>
struct BackwardBarriers {
    uint32_t smem;

    static constexpr int stages = Kernel::stages;
    static constexpr int first_Q = 2;
    static constexpr int first_P = first_Q + 4 * stages;
    static constexpr int first_dS = first_P + 2 * Kernel::role_warps;

    FLASH_DEVICE uint32_t at(int i) const { return smem + 8 * i; }
    FLASH_DEVICE uint32_t full_K() const { return at(0); }
    FLASH_DEVICE uint32_t full_V() const { return at(1); }
    FLASH_DEVICE uint32_t full_Q(int stage) const { return at(first_Q + stage); }
    FLASH_DEVICE uint32_t full_dO(int stage) const { return at(first_Q + stages + stage); }
    FLASH_DEVICE uint32_t empty_Q(int stage) const { return at(first_Q + 2 * stages + stage); }
    FLASH_DEVICE uint32_t empty_dO(int stage) const { return at(first_Q + 3 * stages + stage); }
    FLASH_DEVICE uint32_t full_P(int group) const { return at(first_P + group); }
    FLASH_DEVICE uint32_t empty_P(int group) const { return at(first_P + Kernel::role_warps + group); }
    FLASH_DEVICE uint32_t full_dS(int slot) const { return at(first_dS + slot); }
    FLASH_DEVICE uint32_t empty_dS(int slot) const { return at(first_dS + Kernel::ds_slots + slot); }

    // By one thread, before all others come to a barrier.
    FLASH_DEVICE void initialize() const {
        constexpr int warps = kArrivalsOfWarp;
        constexpr int pair = Kernel::warps_per_group;
        mbarrier_init(full_K(), Kernel::role_threads);
        mbarrier_init(full_V(), Kernel::role_threads);
        for (int i = 0; i < stages; ++i) {
            mbarrier_init(full_Q(i), Kernel::role_threads);
            mbarrier_init(full_dO(i), Kernel::role_threads);
            mbarrier_init(empty_Q(i), Kernel::cfg.n_warps * warps);
            mbarrier_init(empty_dO(i), Kernel::cfg.n_warps * warps);
        }
        for (int i = 0; i < Kernel::n_groups; ++i) {
            mbarrier_init(full_P(i), pair * warps);
            // Pairs read it as the operand of dV, too.
            mbarrier_init(empty_P(i), (Kernel::paired_warps ? 2 * pair : pair) * warps);
        }
        constexpr int readers = Kernel::makes_dQ ? Kernel::dq_warps : 0;
        // A pair's dK reads it, even if the same warps make dQ of it later.
        constexpr int dK_readers = Kernel::paired_warps ? Kernel::role_warps : 0;
        for (int i = 0; i < Kernel::ds_slots; ++i) {
            mbarrier_init(full_dS(i), Kernel::role_warps * warps);
            mbarrier_init(empty_dS(i), max_of(1, (readers + dK_readers) * warps));
        }
    }

    // All lanes of the warp have done what they report.
    static FLASH_DEVICE void arrive(uint32_t barrier, int lane) {
        __syncwarp();
        if (arrives_for_warp(lane)) mbarrier_arrive(barrier);
    }
};

}  // namespace flash::ampere
