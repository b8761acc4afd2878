// Functions of the user's that add to a score what follows from the distance between key and query, batch
// item and head: without a look at each score.
//
//     evenly       what is added grows by the same number from key to key: a row's scores are counted from
//                  what is added in the tile's first column, and what the others have more is added to their
//                  exponents (FromRowStart)
//     else         the scores begin at what is added, and their product adds to it, so that nothing stands
//                  between product and softmax. Two warps of the producer find its values, one for each
//                  distance of a tile, and leave them beside the tile's K slot
//
// All of it is in units of the scores before softmax_scale.
#pragma once

#include "common/mod_values.cuh"
#include "hopper/forward/item_slot.cuh"
#include "hopper/forward/kernel_args.cuh"
#include "hopper/forward/softmax.cuh"

namespace flash::hopper {

// What a mod adds to the scores of an item.
template <typename Kernel>
struct AddedOfDistance {
    using Mod = typename Kernel::Mod;

    const KernelArgs<Mod> &args;
    int batch, head;
    typename Mod::Once once;
    typename Mod::Head of_head;

    FLASH_DEVICE AddedOfDistance(const KernelArgs<Mod> &launch, const ItemOf<Kernel> &item)
        : args(launch),
          batch(item.batch),
          head(item.head),
          once(Mod::once(args.mod.captured)),
          of_head(Mod::head(args.mod.captured, once, batch, head)) {}

    FLASH_DEVICE float operator()(int distance) const {
        return Mod::added(args.mod.captured, once, of_head, batch, head, distance) * args.score_factor;
    }
};

// Two warps of the producer: the values of each tile, before it is said to be there. A tile lies B_c keys
// before the one that is taken before it, so that most of its distances are known from there.
template <typename Kernel>
FLASH_DEVICE void run_diagonal_warps(const SharedMemory<Kernel> smem,
                                     const KernelArgs<typename Kernel::Mod> &args, int thread) {
    constexpr int B_c = Kernel::B_c, kThreads = Kernel::kDiagonalWarps * kWarpSize;
    using Diagonals = typename Kernel::Diagonals;
    RingPosition<Kernel::q_stages> q{0};
    RingPosition<Kernel::k_stages> k{1};
    for (;; q.advance()) {
        mbarrier_wait(smem.q_full(q.slot()), q.phase());  // the item is there
        const ItemOf<Kernel> item = read_item_of(smem, q.slot());
        if (item.end_kv_block == kNoMoreItems) return;
        const AddedOfDistance<Kernel> added(args, item);
        const int last = item.end_kv_block - 1, first = Kernel::tiles_begin ? item.first_kv_block : 0;
        uint32_t before = 0;
        for (int kv_block = last; kv_block >= first; --kv_block, k.advance()) {
            mbarrier_wait(smem.k_empty(k.slot()), k.phase());  // nobody reads what is there
            const uint32_t here = smem.diagonals(k.slot());
            const int lowest = kv_block * B_c - item.q_block * Kernel::B_r + Diagonals::kLowest;
            // Each thread reads what it has written itself.
            const int n_new = B_c % kThreads == 0 && kv_block < last ? B_c : Diagonals::kCount;
#pragma unroll 1
            for (int i = thread; i < n_new; i += kThreads) {
                store_shared(here + i * 4, __float_as_uint(added(lowest + i)));
            }
#pragma unroll 1
            for (int i = n_new + thread; i < Diagonals::kCount; i += kThreads) {
                store_shared(here + i * 4, load_shared_word(before + (i - B_c) * 4));
            }
            before = here;
            __syncwarp();
            if (arrives_for_warp(thread % kWarpSize)) mbarrier_arrive(smem.k_full(k.slot()));
        }
    }
}

// Of an item, where what is added grows evenly.
struct EvenSteps {
    float step, at_none;  // from key to key; at the distance 0
};
struct NoSteps {};

// Consumer: what derives from it and TileRange.
template <typename Kernel, typename Consumer>
struct BegunScores {
    static constexpr int B_c = Kernel::B_c;
    static constexpr int kFarthest = 1 << 14;  // keys, by which a step is found

    [[no_unique_address]] std::conditional_t<Kernel::adds_steps, EvenSteps, NoSteps> even;

    FLASH_DEVICE void find_steps() {
        if constexpr (Kernel::adds_steps) {
            const AddedOfDistance<Kernel> added(self().args, self().item);
            const float step = (added(kFarthest) - added(-kFarthest)) * (0.5f / kFarthest);
            even.step = step == step ? step : 0.f;  // of a head that is hidden by -inf
            even.at_none = added(0);
        }
    }

    // From where the scores of the tile in hand are counted.
    FLASH_DEVICE auto score_start() const {
        if constexpr (Kernel::adds_steps) {
            const int column = accumulator(self().lane, 0).column;
            const int distance = self().kv_block * B_c + column - self().mod_row(self().lane);
            return FromRowStart{{fmaf(even.step, float(distance), even.at_none),
                                 fmaf(even.step, float(distance - 8), even.at_none)},
                                even.step,
                                even.step * self().args.exponent_factor};
        } else {
            return FromZero{};
        }
    }

    // The scores of the tile in hand, which has arrived.
    FLASH_DEVICE void begin_scores() {
        auto &rmem_S = self().rmem_S;
        if constexpr (Kernel::begins_scores) {
            const auto [row, column] = accumulator(computed_here(self().lane), 0);
            Kernel::Diagonals::read(rmem_S, self().smem.diagonals(self().kv.k_slot()),
                                    self().warpgroup * kWarpgroupRows + self().warp * 16 + row, column);
        } else {
#pragma unroll
            for (int i = 0; i < B_c / 2; ++i) rmem_S[i] = 0.f;
        }
    }

  private:
    FLASH_DEVICE Consumer &self() { return static_cast<Consumer &>(*this); }
    FLASH_DEVICE const Consumer &self() const { return static_cast<const Consumer &>(*this); }
};

}  // namespace flash::hopper
