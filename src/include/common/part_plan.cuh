// Into how many parts the keys of one sequence are cut, where the device plans (planned_work.cuh).
//
// The number follows from the sequence's own lengths and from what the launch was told, never from the other
// sequences: what they hold changes no bit of its result. It is the number that would be best if all
// sequences were like this one. One that is much longer than the others would then be worked on by few thread
// blocks, long after the others are done: of sequences with few queries, whose parts cost little memory, no
// part is longer than `longest`. Or the caller has said how many parts there are to be.
#pragma once

#include <cstdint>

#include "common/cuda_utils.cuh"
#include "common/page_table.cuh"

namespace flash {

inline constexpr int kMostParts = 256;  // of a sequence; that the combining kernel has weights for
inline constexpr int kMostWaves = 4;    // flash_helpers.select.part_plan.MOST_WAVES
// In tiles of keys: what an item takes beside its tiles, and what it costs to combine parts.
inline constexpr int kItemTiles = 2, kCombineTiles = 3;

struct PartPlan {
    int slots;              // thread blocks that run at a time; 0: keys are not cut
    KnownDivisor shortest;  // tiles of a part, at least, 1 and up
    KnownDivisor longest;   // tiles of a part of a sequence with few queries, at most
    int few_queries;        // these are so many
    int fixed;              // so many parts, as far as there are tiles; 0: the number is found as said above
    KnownDivisor by_slots;

    static constexpr PartPlan of(int slots, int shortest, int longest, int few_queries, int fixed) {
        return {slots, KnownDivisor::of(shortest),        KnownDivisor::of(longest), few_queries,
                fixed, KnownDivisor::of(max_of(slots, 1))};
    }

    // `items`: that there would be with one part each, if all sequences were like this one. `n_tiles`: of
    // keys, that a block of its queries visits.
    FLASH_HOST_DEVICE constexpr int parts(int64_t items, int n_tiles, int n_queries) const {
        if (fixed > 0) return max_of(1, min_of(fixed, n_tiles));
        if (slots == 0) return 1;
        const int most = max_of(1, min_of(kMostParts, shortest.down(n_tiles)));
        int best = 1;
        if (items > 0 && items < int64_t(kMostWaves) * slots) {
            const int alike = static_cast<int>(items);
            int least = by_slots.up(alike) * (n_tiles + kItemTiles);
            // Blocks wait for this before their first load: the divisions of all waves run beside each other.
#pragma unroll
            for (int waves = 1; waves <= kMostWaves; ++waves) {
                const int parts = min_of(most, divide(waves * slots, alike));
                const int tiles = divide(n_tiles + parts - 1, max_of(parts, 1));  // of the longest part
                const int time = by_slots.up(alike * parts) * (tiles + kItemTiles) + kCombineTiles;
                if (parts > best && time < least) {
                    least = time;
                    best = parts;
                }
            }
        }
        if (n_queries > few_queries) return best;
        return max_of(best, min_of(most, longest.up(n_tiles)));
    }

  private:
    // Of numbers that are not negative: without a sign it takes fewer instructions.
    static FLASH_HOST_DEVICE constexpr int divide(int x, int by) {
        return static_cast<int>(static_cast<unsigned>(x) / static_cast<unsigned>(by));
    }
};

}  // namespace flash
