// P of scores and dS of P and dP, of a consumer's tile: the mask, the exponentials, and what both are rounded
// to.
#pragma once

#include "common/backward/element.cuh"
#include "common/softcap.cuh"
#include "hopper/backward/kernel_args.cuh"
#include "hopper/mask_tile.cuh"

namespace flash::hopper {

FLASH_DEVICE float2 load_shared_float2(uint32_t address) {
    float2 values;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(values.x), "=f"(values.y)
                 : "r"(address)
                 : "memory");
    return values;
}

// Consumer: what derives from it, with scores and the block in hand.
template <typename Kernel, typename Consumer>
struct Probabilities {
    static constexpr int B_r = Kernel::B_r, B_c = Kernel::B_c;
    static constexpr int kPairs = B_r / 8;  // pairs of neighbouring queries, of one key row of a thread

    FLASH_DEVICE bool needs_mask() const {
        const Consumer &wg = self();
        const int first_key = wg.first_key_of_warpgroup();
        // A function may make anything of the score of a query that is none.
        if (Kernel::replaces_scores && wg.q_block * B_r + B_r > wg.item.seq_len_q) return true;
        return !wg.args.template visible<Kernel::traits>(wg.item.seq_len_q, wg.item.seq_len_k)
                    .sees_all(wg.q_block * B_r, wg.q_block * B_r + B_r - 1,
                              {first_key, first_key + kWarpgroupRows});
    }

    // Whether no query of the block in hand sees a key of the warpgroup.
    FLASH_DEVICE bool sees_nothing() const {
        const Consumer &wg = self();
        const int first_key = wg.first_key_of_warpgroup();
        const Range rows = wg.args.template visible<Kernel::traits>(wg.item.seq_len_q, wg.item.seq_len_k)
                               .rows_of({first_key, min(first_key + kWarpgroupRows, wg.item.seq_len_k)});
        return rows.end <= wg.q_block * B_r || rows.begin >= wg.q_block * B_r + B_r;
    }

    // S -> P, rounded into rmem_P, and with half_p into rmem_half. What stays in rmem_S is P in float32, with
    // softcap times the derivative of the cap, so that dS is the gradient of the score before the cap.
    FLASH_DEVICE void probabilities(uint32_t (&rmem_P)[B_r / 4], uint32_t (&rmem_half)[B_r / 4]) {
        Consumer &wg = self();
        if constexpr (!Consumer::kUsualP) return wg.modified_probabilities(rmem_P, rmem_half);
        if constexpr (Kernel::traits.softcap)
            cap_any_scores(wg.rmem_S, wg.args.score_factor, wg.args.exponent_factor);
        if (!Consumer::kMasksScores && needs_mask()) {
            exponentials<true>(rmem_P, rmem_half);
        } else {
            exponentials<false>(rmem_P, rmem_half);
        }
    }

    // dS from P and dP; with half_p rmem_dS holds P before.
    FLASH_DEVICE void score_gradients(uint32_t (&rmem_dS)[B_r / 4], const uint32_t (&rmem_P)[B_r / 4],
                                      const float (&rmem_dP)[B_r / 2]) const {
        const Consumer &wg = self();
        make_score_gradients<false>(rmem_dS, rmem_dP, [&](int i) {
            if constexpr (Kernel::float_p) return float2{wg.rmem_S[i], wg.rmem_S[i + 1]};
            return unpack<Kernel::handed>(Kernel::half_p ? rmem_dS[i / 2] : rmem_P[i / 2]);
        });
    }

    // p(i): elements i and i + 1 of P. kHiddenRows: V and dO may hold NaN where P is 0.
    template <bool kHiddenRows, typename P>
    FLASH_DEVICE void make_score_gradients(uint32_t (&rmem_dS)[B_r / 4], const float (&rmem_dP)[B_r / 2],
                                           const P &p) const {
        const Consumer &wg = self();
        const uint32_t address =
            wg.smem.delta(Consumer::slot(wg.blocks, Consumer::kQStages)) + (wg.lane & 3) * 8;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const float2 delta = load_shared_float2(address + j * 32);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = 4 * j + 2 * r;
                float2 pair = p(i);
                float dp[2] = {rmem_dP[i], rmem_dP[i + 1]};
                if constexpr (Kernel::drops) {
                    const float scale = weight_scale<typename Kernel::Mod>(wg.args);
                    const bool kept[2] = {
                        Kernel::signs_dropped ? pair.x > 0.f : wg.stays.has(j / 2, r, j % 2 * 2),
                        Kernel::signs_dropped ? pair.y > 0.f : wg.stays.has(j / 2, r, j % 2 * 2 + 1)};
#pragma unroll
                    for (int c = 0; c < 2; ++c) dp[c] = kept[c] ? dp[c] * scale : 0.f;
                    if constexpr (Kernel::signs_dropped) pair = {fabsf(pair.x), fabsf(pair.y)};
                }
                float ds[2] = {pair.x * (dp[0] - delta.x), pair.y * (dp[1] - delta.y)};
                if (kHiddenRows && pair.x == 0.f) ds[0] = 0.f;
                if (kHiddenRows && pair.y == 0.f) ds[1] = 0.f;
                rmem_dS[i / 2] = pack<Kernel::dtype>(ds[0], ds[1]);
            }
        }
    }

    // Columns of the block in hand that see the thread's key of row r.
    FLASH_DEVICE Range visible_columns(int r) const {
        const Consumer &wg = self();
        const int key = wg.first_key() + 8 * r;
        const Range rows = wg.args.template visible<Kernel::traits>(wg.item.seq_len_q, wg.item.seq_len_k)
                               .rows_of({key, key + 1});
        const int first_row = wg.q_block * B_r;
        return {rows.begin - first_row, key < wg.item.seq_len_k ? rows.end - first_row : 0};
    }

    // What does not see, or is not seen, becomes `hidden`.
    FLASH_DEVICE void mask_elements(float hidden) {
        Consumer &wg = self();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Range columns = visible_columns(r);
            keep_columns<B_r, true>(wg.rmem_S, r, wg.lane, columns.end, columns.begin, hidden);
        }
    }

    FLASH_DEVICE void mask_packed(uint32_t (&rmem_P)[B_r / 4]) const {
        const Consumer &wg = self();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Range columns = visible_columns(r);
            const int kept = kept_elements(wg.lane, columns.end),
                      left_out = kept_elements(wg.lane, columns.begin);
#pragma unroll
            for (int j = 0; j < kPairs; ++j) {
                const uint32_t low = 2 * j < kept && 2 * j >= left_out ? 0xffffu : 0u;
                const uint32_t high = 2 * j + 1 < kept && 2 * j + 1 >= left_out ? 0xffff0000u : 0u;
                rmem_P[2 * j + r] &= low | high;
            }
        }
    }

    template <bool kMasked>
    FLASH_DEVICE void exponentials(uint32_t (&rmem_P)[B_r / 4], uint32_t (&rmem_half)[B_r / 4]) {
        Consumer &wg = self();
        const uint32_t address =
            wg.smem.lse(Consumer::slot(wg.blocks, Consumer::kQStages)) + (wg.lane & 3) * 8;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const float2 lse = Consumer::kLseAhead ? wg.rmem_lse[j] : load_shared_float2(address + j * 32);
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                p[i] = exp2_approx(
                    fmaf(wg.rmem_S[4 * j + i], wg.args.exponent_factor, i % 2 == 0 ? -lse.x : -lse.y));
                const float tanh = wg.rmem_S[4 * j + i];
                wg.rmem_S[4 * j + i] = Kernel::traits.softcap ? p[i] * (1.f - tanh * tanh) : p[i];
            }
            if (!kMasked || Kernel::traits.softcap) {
                round_pair(rmem_P, rmem_half, 2 * j, p[0], p[1]);
                round_pair(rmem_P, rmem_half, 2 * j + 1, p[2], p[3]);
            }
        }
        if constexpr (!kMasked) return;
        mask_elements(0.f);
        if constexpr (Kernel::traits.softcap) {
            mask_packed(rmem_P);
        } else {
#pragma unroll
            for (int i = 0; i < B_r / 4; ++i) {
                round_pair(rmem_P, rmem_half, i, wg.rmem_S[2 * i], wg.rmem_S[2 * i + 1]);
            }
        }
    }

    static FLASH_DEVICE void round_pair(uint32_t (&rmem_P)[B_r / 4], uint32_t (&rmem_half)[B_r / 4], int i,
                                        float first, float second) {
        rmem_P[i] = pack<Kernel::dtype>(first, second);
        if constexpr (Kernel::half_p) rmem_half[i] = pack<DType::FP16>(first, second);
    }

  private:
    FLASH_DEVICE Consumer &self() { return static_cast<Consumer &>(*this); }
    FLASH_DEVICE const Consumer &self() const { return static_cast<const Consumer &>(*this); }
};

}  // namespace flash::hopper
