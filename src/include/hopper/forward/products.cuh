// The two products of a consumer warpgroup, issued and left running: S (64, B_c) = Q K^T with both operands
// in shared memory, O (64, d_v) += P V with P in registers.
//
// The slots come as `UniformSlots`: numbers that the compiler knows to be equal in the whole warp, so that
// descriptors are computed in uniform registers. Otherwise each wgmma is preceded by moves (R2UR) of its
// descriptor from vector registers.
#pragma once

#include "hopper/forward/pipeline.cuh"
#include "hopper/wgmma.cuh"

namespace flash::hopper {

struct UniformSlots {
    uint32_t k, v, q;
};

// One shuffle makes three slots uniform. Without the added zero, which the compiler cannot know, ptxas would
// prove the shuffle needless, drop it, and keep the slots in vector registers all the same.
FLASH_DEVICE UniformSlots make_uniform(uint32_t k, uint32_t v, uint32_t q, uint32_t opaque_zero) {
    // q lowest: it stays the same through an item's loop, and needs no shift there.
    const uint32_t packed = __shfl_sync(kAllLanes, (q | (k << 8) | (v << 16)) + opaque_zero, 0);
    return {(packed >> 8) & 255, packed >> 16, packed & 255};
}

// Descriptors of one step's tiles.
struct Descriptors {
    uint64_t q, k, v;
};

template <typename Kernel>
struct Products {
    using PVWgmma = Wgmma<Kernel::dtype, Kernel::d_head_v>;

    uint32_t q_lower_word, k_lower_word, v_lower_word;  // of the descriptors of slot 0

    FLASH_DEVICE Products(const SharedMemory<Kernel> &smem, int warpgroup)
        : q_lower_word(descriptor_lower_word(smem.q(0) + warpgroup * kWarpgroupRows * kPanelRowBytes, 16)),
          k_lower_word(descriptor_lower_word(smem.k(0), 16)),
          v_lower_word(descriptor_lower_word(smem.v(0), Kernel::B_c * kPanelRowBytes)) {}

    FLASH_DEVICE Descriptors descriptors(const UniformSlots &slots) const {
        return {make_descriptor(q_lower_word + slots.q * descriptor_step(Kernel::q_bytes)),
                make_descriptor(k_lower_word + slots.k * descriptor_step(Kernel::k_bytes)),
                make_descriptor(v_lower_word + slots.v * descriptor_step(Kernel::v_bytes))};
    }

    // The scores of the tile's first n_columns; the others stay as they are. What scores begin at is there.
    template <int n_columns = Kernel::B_c>
    FLASH_DEVICE void issue_qk(float (&rmem_S)[Kernel::B_c / 2], const Descriptors &tiles,
                               const uint32_t (&rmem_Q)[Kernel::q_registers]) const {
        using QKWgmma = Wgmma<Kernel::dtype, n_columns>;
        constexpr int kFirst = Kernel::begins_scores ? -1 : 0;  // the step that takes nothing before it
        float (&scores)[n_columns / 2] = reinterpret_cast<float (&)[n_columns / 2]>(rmem_S);
        pin_registers(rmem_S);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Kernel::q_shared_steps; ++step) {
            QKWgmma::multiply_shared(scores, tiles.q + column_step(step, Kernel::B_r),
                                     tiles.k + column_step(step, Kernel::B_c), step > kFirst);
        }
#pragma unroll
        for (int i = 0; i < Kernel::cfg.q_register_steps; ++i) {
            const int step = Kernel::q_shared_steps + i;
            QKWgmma::template multiply_registers<false>(
                scores, rmem_Q + 4 * i, tiles.k + column_step(step, Kernel::B_c), step > kFirst);
        }
        wgmma_commit();
    }

    // `pass_turn` is called after the last step, or (early_pass) half way.
    template <typename PassTurn>
    FLASH_DEVICE void issue_pv(float (&rmem_O)[Kernel::d_head_v / 2], uint32_t (&rmem_P)[Kernel::B_c / 4],
                               const Descriptors &tiles, const PassTurn &pass_turn) const {
        constexpr int kSteps = Kernel::B_c / kMmaDepth;
        pin_registers(rmem_O);
        pin_registers(rmem_P);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (Kernel::cfg.early_pass && step == kSteps / 2) pass_turn();
            PVWgmma::template multiply_registers<true>(rmem_O, rmem_P + 4 * step, tiles.v + row_step(step),
                                                       1);
        }
        wgmma_commit();
        if (!Kernel::cfg.early_pass) pass_turn();
    }
};

}  // namespace flash::hopper
