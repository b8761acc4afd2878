// What functions of the user's do to the scores of a tile, and which weights dropout keeps.
#pragma once

#include "hopper/forward/score_mods.cuh"
#include "hopper/forward/streamed_tiles.cuh"
#include "hopper/forward/tile_slot.cuh"

namespace flash::hopper {

// Of a kernel without a mod nothing.
struct NothingKnown {};
template <typename Kernel>
struct KnownAheadOf {
    using Type = NothingKnown;
};
template <typename Kernel>
    requires(Kernel::has_mod)
struct KnownAheadOf<Kernel> {
    using Type = typename ScoreMods<Kernel>::Known;
};

// Consumer: what derives from it, with TileRange's members, scores, what is known of them and the item in
// hand.
template <typename Kernel, typename Consumer>
struct ModifiedScores {
    static constexpr int B_c = Kernel::B_c;

    // A function of the user's may hide all that a query sees of a tile, and the reference of a query that
    // has met no key says nothing of the next one's score: whether the tile in hand takes an exact step.
    // Asked while its scores are computed.
    FLASH_DEVICE void look_back() {
        Consumer &wg = self();
        if constexpr (Kernel::mod_hides_keys) {
            const bool met_none = fminf(wg.softmax.reference[0], wg.softmax.reference[1]) <= wg.args.lowest;
            wg.needs_exact_step = __any_sync(kAllLanes, met_none || wg.tile_words.kind != TileKind::FULL);
        }
    }

    // It hides all of the tile from the warpgroup.
    FLASH_DEVICE bool sees_nothing() const {
        return Kernel::mod_hides_keys && self().tile_words.kind == TileKind::EMPTY;
    }

    // What functions of the user's do to the scores of the tile in hand. Where the thread's elements are is
    // found out anew: else what follows from it for each column is held from tile to tile.
    // kFinds: nobody has called find_ahead for the tile. kCopied: what is streamed is in shared memory, until
    // it has been read once. `hides`: some of the tile may be hidden.
    template <bool kFinds, bool kCopied = Kernel::copies_streamed>
    FLASH_DEVICE void apply_mod(bool hides) {
        Consumer &wg = self();
        constexpr bool kAhead = kCopied || !(Kernel::copies_streamed || ScoreMods<Kernel>::kOneByOne);
        if constexpr (kAhead && (kFinds || !ScoreMods<Kernel>::kFoundEarly)) find_known<kCopied>();
        const int thread_lane = computed_here(wg.lane);
        const int row = mod_row(thread_lane);
        constexpr bool kReadsTile = kCopied && ScoreMods<Kernel>::Known::kInGroups;
        auto tile = streamed_tile();
        if constexpr (kReadsTile) tile.await();
        const auto find_group = [&](int square) {
            if constexpr (kReadsTile) {
                tile.read_group(wg.known, wg.warp, square, thread_lane);
            } else if constexpr (kAhead && !kCopied) {
                wg.known.find_group(wg.args.mod.captured, wg.item.batch, wg.item.head, row,
                                    wg.kv_block * B_c + square * kMmaN, thread_lane);
            }
        };
        mods().template apply<kAhead>(
            wg.rmem_S, wg.known, wg.args.score_factor, row, wg.kv_block * B_c, thread_lane,
            Kernel::mod_hides_keys && hides ? wg.tile_words.kind : TileKind::FULL, find_group);
        if constexpr (kReadsTile) release_streamed(tile);
    }
    // What is known of the tile's scores, while they are computed.
    static constexpr int kPlaceOfKnown = 1 << 16;  // of divide_schedule, behind those of ScoreMods
    FLASH_DEVICE void find_ahead() {
        Consumer &wg = self();
        if constexpr (Kernel::has_mod) {
            if constexpr (ScoreMods<Kernel>::kFoundEarly) {
                find_known<Kernel::copies_streamed>();
                divide_schedule(wg.seq_len_q(), kPlaceOfKnown);  // else ptxas puts it behind the wait
            }
        }
    }
    template <bool kCopied>
    FLASH_DEVICE void find_known() {
        Consumer &wg = self();
        const int thread_lane = computed_here(wg.lane);
        const int row = mod_row(thread_lane);
        if constexpr (kCopied) {
            wg.known.find_diagonals(wg.args.mod.captured, wg.item.batch, wg.item.head, row, wg.kv_block * B_c,
                                    thread_lane);
            if constexpr (!ScoreMods<Kernel>::Known::kInGroups) {
                auto tile = streamed_tile();
                tile.await();
                tile.read_group(wg.known, wg.warp, 0, thread_lane);
                release_streamed(tile);
            }
            return;
        }
        if (ScoreMods<Kernel>::kFoundEarly && wg.kv_block > 0) {
            wg.known.prefetch(wg.args.mod.captured, wg.item.batch, wg.item.head, row - (thread_lane >> 2),
                              (wg.kv_block - 1) * B_c, thread_lane);
        }
        wg.known.find(wg.args.mod.captured, wg.item.batch, wg.item.head, row, wg.kv_block * B_c, thread_lane);
    }
    FLASH_DEVICE StreamedTile<Kernel> streamed_tile() const {
        return {self().smem, self().warpgroup, self().kv.passed};
    }
    FLASH_DEVICE void release_streamed(const StreamedTile<Kernel> &tile) {
        Consumer &wg = self();
        tile.await_reads(wg.smem);
        wg.release(tile.empty);
    }
    FLASH_DEVICE ScoreMods<Kernel> mods() const {
        const Consumer &wg = self();
        return {wg.args.mod.captured, wg.item.batch, wg.item.head, wg.seq_len_q()};
    }
    FLASH_DEVICE int mod_row(int thread_lane) const {
        const Consumer &wg = self();
        return wg.first_row() + wg.warp * 16 + accumulator(thread_lane, 0).row;
    }

    // Of P, of which the sums have been taken.
    FLASH_DEVICE void drop_weights() {
        Consumer &wg = self();
        if constexpr (Kernel::drops) {
            const int thread_lane = computed_here(wg.lane);
            const auto kept = mods().kept_weights(mod_row(thread_lane), wg.kv_block * B_c, thread_lane);
#pragma unroll
            for (int i = 0; i < B_c / 2; ++i) {
                if (!kept.has(i / 4, i % 4)) wg.rmem_S[i] = 0.f;
            }
        }
    }

  private:
    FLASH_DEVICE Consumer &self() { return static_cast<Consumer &>(*this); }
    FLASH_DEVICE const Consumer &self() const { return static_cast<const Consumer &>(*this); }
};

}  // namespace flash::hopper
