// The five products of a step, issued and left running. Rows of S, dP and dS are keys, their columns queries:
//
//     S^T  (64, B_r) = K Q^T           dV (64, d_v) += P^T dO       P and dS are A operands in registers
//     dP^T (64, B_r) = V dO^T          dK (64, d)   += dS^T Q
//     dQ   (64, 64)  = dS K, a part (of 96 columns (64, 48)) of (B_r, d): dS^T from shared memory, of the
//     keys of all warpgroups
//
// Slots are known to be equal in the whole warp (`uniform_word`), so that descriptors are computed in uniform
// registers; otherwise each wgmma is preceded by moves of its descriptor from vector registers.
#pragma once

#include "hopper/backward/shared_memory.cuh"
#include "hopper/wgmma.cuh"

namespace flash::hopper {

template <typename Kernel>
struct BackwardProducts {
    template <int N>
    using Product = Wgmma<Kernel::dtype, N>;
    static constexpr int B_r = Kernel::B_r, B_c = Kernel::B_c;
    static constexpr int d_head = Kernel::d_head, d_head_v = Kernel::d_head_v;
    static constexpr uint32_t kSameTile = 16;  // a distance that is not used

    // Lower words of descriptors of slot 0: of rows as they are, and reduction first (`_t`).
    uint32_t k, v, q, dout, q_t, dout_t, ds_t, k_t;

    FLASH_DEVICE BackwardProducts(const BackwardSharedMemory<Kernel> &smem, int warpgroup)
        : k(descriptor_lower_word(smem.k(0) + keys(warpgroup) * kPanelRowBytes, kSameTile)),
          v(descriptor_lower_word(smem.v(0) + keys(warpgroup) * kPanelRowBytes, kSameTile)),
          q(descriptor_lower_word(smem.q(0), kSameTile)),
          dout(descriptor_lower_word(smem.dout(0), kSameTile)),
          q_t(descriptor_lower_word(smem.q(0), B_r * kPanelRowBytes)),
          dout_t(descriptor_lower_word(smem.dout(0), B_r * kPanelRowBytes)),
          ds_t(descriptor_lower_word(
              smem.ds(0) + (Kernel::dq_parts_are_rows ? warpgroup * B_c * kPanelRowBytes : 0), kSameTile)),
          k_t(descriptor_lower_word(
              smem.k(0) + (Kernel::dq_parts_are_rows ? 0 : warpgroup * B_c * kPanelRowBytes), kSameTile)) {}

    FLASH_DEVICE void issue_scores(float (&rmem_S)[B_r / 2], uint32_t k_slot, uint32_t q_slot) const {
        issue_rows<d_head, Kernel::k_panel_step>(rmem_S, k + k_slot * descriptor_step(Kernel::k_bytes),
                                                 q + q_slot * descriptor_step(Kernel::q_bytes));
    }

    FLASH_DEVICE void issue_dp(float (&rmem_dP)[B_r / 2], uint32_t v_slot, uint32_t q_slot) const {
        issue_rows<d_head_v>(rmem_dP, v + v_slot * descriptor_step(Kernel::v_bytes),
                             dout + q_slot * descriptor_step(Kernel::do_bytes));
    }

    FLASH_DEVICE void issue_dv(float (&rmem_dV)[d_head_v / 2], uint32_t (&rmem_P)[B_r / 4],
                               uint32_t q_slot) const {
        issue_sum<d_head_v>(rmem_dV, rmem_P, dout_t + q_slot * descriptor_step(Kernel::do_bytes));
    }

    FLASH_DEVICE void issue_dk(float (&rmem_dK)[d_head / 2], uint32_t (&rmem_dS)[B_r / 4],
                               uint32_t q_slot) const {
        issue_sum<d_head>(rmem_dK, rmem_dS, q_t + q_slot * descriptor_step(Kernel::q_bytes));
    }

    FLASH_DEVICE void issue_dq(float (&rmem_dQ)[Kernel::dq_part_floats / 128], uint32_t ds_slot,
                               uint32_t k_slot) const {
        const uint64_t a = make_descriptor(ds_t + ds_slot * descriptor_step(Kernel::ds_bytes));
        const uint64_t b = make_descriptor(k_t + k_slot * descriptor_step(Kernel::k_bytes));
        pin_registers(rmem_dQ);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < B_c / kMmaDepth; ++step) {
            Product<Kernel::dq_columns>::template multiply_shared<true, true>(rmem_dQ, a + row_step(step),
                                                                              b + row_step(step), step > 0);
        }
        wgmma_commit();
    }

  private:
    // A warpgroup's first key in its block.
    static FLASH_DEVICE constexpr int keys(int warpgroup) {
        return Kernel::split ? 0 : warpgroup * kWarpgroupRows;
    }

    // a_step: the columns at which panels of A begin.
    template <int depth, int a_step = kPanelColumns>
    static FLASH_DEVICE void issue_rows(float (&rmem)[B_r / 2], uint32_t a_word, uint32_t b_word) {
        const uint64_t a = make_descriptor(a_word), b = make_descriptor(b_word);
        pin_registers(rmem);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < depth / kMmaDepth; ++step) {
            Product<B_r>::multiply_shared(rmem, a + column_step(step, B_c, a_step),
                                          b + column_step(step, B_r), step > 0);
        }
        wgmma_commit();
    }

    template <int columns>
    static FLASH_DEVICE void issue_sum(float (&rmem)[columns / 2], uint32_t (&rmem_A)[B_r / 4],
                                       uint32_t b_word) {
        const uint64_t b = make_descriptor(b_word);
        pin_registers(rmem);
        pin_registers(rmem_A);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < B_r / kMmaDepth; ++step) {
            Product<columns>::template multiply_registers<true>(rmem, rmem_A + 4 * step, b + row_step(step),
                                                                1);
        }
        wgmma_commit();
    }
};

}  // namespace flash::hopper
