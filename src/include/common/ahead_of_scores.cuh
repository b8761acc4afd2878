// What a warp knows of 16 x n scores before they are there, where its mod has something of the kind
// (flash_helpers/mods/ahead.py): it can be found while the product runs.
#pragma once

#include "common/diagonals.cuh"
#include "common/known_ahead.cuh"
#include "common/mod.cuh"
#include "common/mod_values.cuh"
#include "common/streamed_rows.cuh"

namespace flash {

// kStreamedSquares: of so many rows are read at a time; less than all where there are no registers for more.
template <typename Mod, int kSquares, int kStreamedSquares = kSquares>
struct AheadOfScores {
    static constexpr bool kInGroups = streams_rows<Mod> && kStreamedSquares < kSquares;
    static_assert(kSquares % kStreamedSquares == 0);

    static constexpr auto streamed_rows() {
        if constexpr (streams_rows<Mod>) {
            using Row = decltype(Mod::streamed_row(typename Mod::Row{}));
            return StreamedRows<typename Row::Element, kStreamedSquares>{};
        } else {
            return NoStreamedRows{};
        }
    }
    static constexpr auto diagonal_values() {
        if constexpr (has_diagonal<Mod>) {
            return Diagonals<kSquares, (Mod::kDiagonalCost >= kLeastSharedCost)>{};
        } else {
            return NoDiagonals{};
        }
    }
    using Streamed = decltype(streamed_rows());
    using OfDistance = decltype(diagonal_values());
    static constexpr int kRegisters = Streamed::kRegisters + OfDistance::kRegisters;

    [[no_unique_address]] Streamed streamed;
    [[no_unique_address]] OfDistance diagonals;

    // `row`: the thread's first, of two that are 8 apart; `first_key`: of the warp's scores. In groups: of
    // each, with its first key, before its first value is asked for.
    FLASH_DEVICE void read_group(const typename Mod::Captured &captured, int batch, int head, int row,
                                 int first_key, int lane) {
        if constexpr (streams_rows<Mod>) {
            const auto once = Mod::once(captured);
            const auto of_head = Mod::head(captured, once, batch, head);
            const typename Streamed::Row rows[2] = {
                Mod::streamed_row(Mod::row(captured, once, of_head, batch, head, row)),
                Mod::streamed_row(Mod::row(captured, once, of_head, batch, head, row + 8))};
            streamed.read(rows, Mod::streamed_stride(captured), first_key, lane);
        }
    }

    // All but groups.
    FLASH_DEVICE void find(const typename Mod::Captured &captured, int batch, int head, int row,
                           int first_key, int lane) {
        if constexpr (knows_ahead<Mod>) {
            if constexpr (!kInGroups) read_group(captured, batch, head, row, first_key, lane);
            find_diagonals(captured, batch, head, row, first_key, lane);
            if constexpr (streams_rows<Mod> && !kInGroups) streamed.arrange(lane);
        }
    }
    FLASH_DEVICE void find_diagonals(const typename Mod::Captured &captured, int batch, int head, int row,
                                     int first_key, int lane) {
        if constexpr (has_diagonal<Mod>) {
            const auto once = Mod::once(captured);
            const auto of_head = Mod::head(captured, once, batch, head);
            const int first_row = row - (lane >> 2);  // of the warp
            diagonals.find(lane, [&](int distance) {
                return Mod::diagonal(captured, once, of_head, batch, head, first_key - first_row + distance);
            });
        }
    }
    FLASH_DEVICE void find_group(const typename Mod::Captured &captured, int batch, int head, int row,
                                 int first_key, int lane) {
        if constexpr (kInGroups) {
            read_group(captured, batch, head, row, first_key, lane);
            streamed.arrange(lane);
        }
    }

    // What `find` reads of another tile, as near as a cache. `warp_row`: the warp's first.
    static FLASH_DEVICE void prefetch(const typename Mod::Captured &captured, int batch, int head,
                                      int warp_row, int first_key, int lane) {
        if constexpr (streams_rows<Mod>) {
            const auto once = Mod::once(captured);
            const auto of_head = Mod::head(captured, once, batch, head);
            const auto find_row = [&](int i) {
                return Mod::streamed_row(Mod::row(captured, once, of_head, batch, head, warp_row + i));
            };
            Streamed::prefetch(find_row, Mod::streamed_stride(captured), first_key, lane);
        }
    }

    // Of the thread's row r, square n, column c.
    FLASH_DEVICE mods::Ahead at(int r, int n, int c) const {
        mods::Ahead known{};
        if constexpr (streams_rows<Mod>) known.streamed = streamed.value(r, n % kStreamedSquares, c);
        if constexpr (has_diagonal<Mod>) known.diagonal = diagonals.value(r, n, c);
        return known;
    }
};

// Of scores for which nothing is found ahead.
struct NothingAhead {
    static constexpr bool kInGroups = false;
    template <typename... Where>
    FLASH_DEVICE void prefetch(const Where &...) const {}
    template <typename... Where>
    FLASH_DEVICE void find(const Where &...) const {}
    template <typename... Where>
    FLASH_DEVICE void find_group(const Where &...) const {}
};

}  // namespace flash
