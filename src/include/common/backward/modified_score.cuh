// A score as functions of the user's leave it, and by how much it changes with the one that they are given:
// what dS is multiplied by.
#pragma once

#include "common/cuda_utils.cuh"
#include "common/mod.cuh"
#include "common/mod_values.cuh"
#include "common/ptx.cuh"
#include "common/softmax_scale.cuh"

namespace flash {

struct Probability {
    float value;
    float handed_on;  // times the derivative of the score
};

// A mod in one head of a batch item, for one thread.
template <typename Mod>
struct HeadMod {
    using Row = typename Mod::Row;
    using Column = typename Mod::Column;

    const typename Mod::Captured &captured;
    int batch, head;
    typename Mod::Once once;
    typename Mod::Head of_head;

    FLASH_DEVICE HeadMod(const typename Mod::Captured &captured, int batch, int head)
        : captured(captured),
          batch(batch),
          head(head),
          once(Mod::once(captured)),
          of_head(Mod::head(captured, once, batch, head)) {}

    FLASH_DEVICE Row row(int query) const { return Mod::row(captured, once, of_head, batch, head, query); }
    FLASH_DEVICE Column column(int key) const {
        return Mod::column(captured, once, of_head, batch, head, key);
    }

    FLASH_DEVICE bool visible(const Row &row, const Column &column, int query, int key) const {
        return Mod::visible(captured, once, of_head, row, column, 0.f, batch, head, query, key);
    }

    // `given`: the scaled score. What is hidden is -inf.
    FLASH_DEVICE float score(const Row &row, const Column &column, float given, int query, int key) const {
        float score = given;
        if constexpr (Mod::kChangesScores) {
            score = Mod::score(captured, once, of_head, row, column, given, batch, head, query, key);
        }
        return hidden_or(score, row, column, query, key);
    }

    // The same, with what is known of it.
    FLASH_DEVICE float score_ahead(const Row &row, const Column &column, const mods::Ahead &known,
                                   float given, int query, int key) const {
        const float score =
            Mod::score_ahead(captured, once, of_head, row, column, known, given, batch, head, query, key);
        return hidden_or(score, row, column, query, key);
    }

    // What the mod knows of the distance between key and query.
    FLASH_DEVICE float diagonal(int distance) const {
        return Mod::diagonal(captured, once, of_head, batch, head, distance);
    }

    // `given`: the scaled score. `lse_log2`: of the row, in powers of 2. What is hidden is exactly 0.
    FLASH_DEVICE Probability probability(const Row &row, const Column &column, float given, int query,
                                         int key, float lse_log2) const {
        const float P = exp2_approx(fmaf(score(row, column, given, query, key), kLog2e, -lse_log2));
        float handed_on = P;
        if constexpr (Mod::kScalesGradients) {
            const float slope =
                Mod::d_score(captured, once, of_head, row, column, given, batch, head, query, key);
            handed_on = P == 0.0f ? 0.0f : P * slope;
        }
        return {P, handed_on};
    }

  private:
    FLASH_DEVICE float hidden_or(float score, const Row &row, const Column &column, int query,
                                 int key) const {
        if constexpr (Mod::kHidesKeys) {
            if (!visible(row, column, query, key)) return -INFINITY;
        }
        return score;
    }
};

}  // namespace flash
