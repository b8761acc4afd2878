// Functions of the user's in a kernel: what a generated mod (flash_helpers/mods/cpp.py) has, and what stands
// where there is none.
//
//     kSignature                             which mod it is, and how much it captures
//     struct Captured                        what it captures; captured(…) makes it of a launch's arguments
//     struct Once, Head, Row, Column         values by what they depend on, and functions of the same names
//     kChangesScores, kHidesKeys             which of the two functions below there are
//     float score(…), bool visible(…)
//     kBoundsTell, Truth tile(…), …          what its mask tells of tiles (flash_helpers/mods/cpp_tiles.py)
#pragma once

#include <type_traits>

#include "mod_arguments.cuh"

namespace flash {

struct NoMod {};

template <typename Mod>
inline constexpr bool is_mod = !std::is_same_v<Mod, NoMod>;

template <typename Mod>
constexpr bool changes_scores() {
    if constexpr (is_mod<Mod>) return Mod::kChangesScores;
    return false;
}

template <typename Mod>
constexpr bool hides_keys() {
    if constexpr (is_mod<Mod>) return Mod::kHidesKeys;
    return false;
}

// What is a part of a kernel's arguments where it has a mod.
template <typename Mod>
struct ModOfLaunch {
    typename Mod::Captured captured;
    ModTiles tiles;
};
template <>
struct ModOfLaunch<NoMod> {};

template <typename Mod>
ModOfLaunch<Mod> mod_of_launch(const ModArguments &given) {
    return {Mod::captured(given), given.tiles};
}

// Of a kernel's record.
template <typename Mod>
constexpr ModSignature signature_of() {
    if constexpr (is_mod<Mod>) return Mod::kSignature;
    return {};
}

// Whether dS is made of something else than P: P times the derivative of the score.
template <typename Mod>
constexpr bool scales_gradients() {
    if constexpr (is_mod<Mod>) return Mod::kScalesGradients;
    return false;
}

}  // namespace flash
