// What a warp knows of 16 x 8 n scores, rows of which are keys, before they are there, where its mod has
// something of the kind (flash_helpers/mods/ahead.py): ahead_of_scores.cuh, the other way round.
#pragma once

#include "common/ahead_of_scores.cuh"
#include "common/backward/streamed_columns.cuh"
#include "common/known_ahead.cuh"

namespace flash {

template <typename Mod, int kSquares>
struct AheadOfColumns {
    static constexpr int kQueries = kSquares * kMmaN;
    static constexpr bool kStreams = knows_columns_ahead<Mod> && streams_columns<Mod>;

    static constexpr auto streamed_columns() {
        if constexpr (kStreams) {
            using Row = decltype(Mod::streamed_row(typename Mod::Row{}));
            return StreamedColumns<typename Row::Element, kSquares>{};
        } else {
            return NoStreamedRows{};
        }
    }
    using Streamed = decltype(streamed_columns());
    static constexpr int kRegisters = Streamed::kRegisters;

    [[no_unique_address]] Streamed streamed;

    // `query`: the warp's first; `first_key`: of its 16.
    FLASH_DEVICE void read(const typename Mod::Captured &captured, int batch, int head, int query,
                           int first_key, int lane) {
        if constexpr (kStreams) {
            streamed.read(finder(captured, batch, head, query), Mod::streamed_stride(captured),
                          Mod::streamed_step(captured), first_key, lane);
        }
    }

    // Until `read`.
    FLASH_DEVICE void forget() {
        if constexpr (kStreams) streamed.forget();
    }

    FLASH_DEVICE void arrange() {
        if constexpr (kStreams) streamed.arrange();
    }

    // What `read` reads of another block of queries, as near as a cache: of its rows `first` and so many more
    // the line in which `first_key` lies.
    static FLASH_DEVICE void prefetch(const typename Mod::Captured &captured, int batch, int head, int query,
                                      int first_key, int first, int count, int lane) {
        if constexpr (kStreams) {
            Streamed::prefetch(finder(captured, batch, head, query), Mod::streamed_stride(captured),
                               first_key, first, count, lane);
        }
    }

    // Of the thread's row r, square n, column c. `diagonal`: the value of its distance, if the mod has one.
    FLASH_DEVICE mods::Ahead at(int r, int n, int c, float diagonal) const {
        mods::Ahead known{};
        if constexpr (kStreams) known.streamed = streamed.value(r, n, c);
        known.diagonal = diagonal;
        return known;
    }

  private:
    // Finds rows, counted from `query` on.
    static FLASH_DEVICE auto finder(const typename Mod::Captured &captured, int batch, int head, int query) {
        return [&captured, batch, head, query](int i) {
            const auto once = Mod::once(captured);
            const auto of_head = Mod::head(captured, once, batch, head);
            return Mod::streamed_row(Mod::row(captured, once, of_head, batch, head, query + i));
        };
    }
};

// Where there is no mod.
template <int kSquares>
struct AheadOfColumns<NoMod, kSquares> {
    static constexpr int kRegisters = 0;
    FLASH_DEVICE void forget() {}
};

}  // namespace flash
