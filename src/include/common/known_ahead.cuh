// Whether a mod has something that is known of scores before they are there (flash_helpers/mods/ahead.py).
// Configurations are made of it, so that a plain C++ compiler builds this.
#pragma once

#include "common/mod.cuh"
#include "common/streamed_tensor.cuh"

namespace flash {

template <typename Mod>
inline constexpr bool streams_rows = [] {
    if constexpr (is_mod<Mod>) return Mod::kStreams;
    return false;
}();
template <typename Mod>
inline constexpr bool has_diagonal = [] {
    if constexpr (is_mod<Mod>) return Mod::kHasDiagonal;
    return false;
}();
template <typename Mod>
inline constexpr bool knows_ahead = streams_rows<Mod> || has_diagonal<Mod>;

// A value of the distance of fewer instructions costs less than handing it over.
inline constexpr int kLeastSharedCost = 4;

template <typename Mod>
inline constexpr bool streams_columns = [] {
    if constexpr (streams_rows<Mod>) return Mod::kStreamsEvenly;
    return false;
}();

// Whether rows of neighbouring queries are tiles that a copy can bring.
template <typename Mod>
inline constexpr bool streams_tiles = [] {
    if constexpr (streams_columns<Mod>) return Mod::kStreamedTensor.n_dims <= mods::kCopiedDims;
    return false;
}();

// Whether a score is computed of what is known: all that the mod would have so.
template <typename Mod>
inline constexpr bool knows_columns_ahead = knows_ahead<Mod> && streams_columns<Mod> == streams_rows<Mod>;

// Whether a score is the given one and something of the distance, which can be there before it.
template <typename Mod>
inline constexpr bool adds_of_distance = [] {
    if constexpr (is_mod<Mod>) return Mod::kAddsOfDistance;
    return false;
}();
// Whether that grows by the same number from each distance to the next.
template <typename Mod>
inline constexpr bool adds_evenly = [] {
    if constexpr (is_mod<Mod>) return Mod::kAddsEvenly;
    return false;
}();

// Whether a value of the distance takes so many instructions that handing it over costs less.
template <typename Mod>
inline constexpr bool has_costly_diagonal = [] {
    if constexpr (has_diagonal<Mod>) return Mod::kDiagonalCost >= kLeastSharedCost;
    return false;
}();

}  // namespace flash
