// Functions of the user's in a kernel: what a generated mod (flash_helpers/mods/cpp.py) has, and what stands
// where there is none.
//
//     kSignature                             which mod it is, and how much it captures
//     struct Captured                        what it captures; captured(…) makes it of a launch's arguments
//     struct Once, Head, Row, Column         values by what they depend on, and functions of the same names
//     kChangesScores, kHidesKeys             which of the two functions below there are
//     kDrops                                 whether weights are dropped; Captured::dropout then says which
//     float score(…), bool visible(…)
//     kBoundsTell, Truth tile(…), …          what its mask tells of tiles (flash_helpers/mods/cpp_tiles.py)
#pragma once

#include <type_traits>

#include "common/cuda_utils.cuh"
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

// Whether weights are dropped behind the softmax (dropout.cuh).
template <typename Mod>
inline constexpr bool drops_weights = [] {
    if constexpr (is_mod<Mod>) return Mod::kDrops;
    return false;
}();

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

// A kernel's arguments, and behind them what its mod captures.
template <typename Args, typename Mod>
struct ArgsWithMod : Args {
    ModOfLaunch<Mod> mod;
};
template <typename Args, typename Mod>
using ArgsFor = std::conditional_t<is_mod<Mod>, ArgsWithMod<Args, Mod>, Args>;

// `args` are the beginning of a kernel's arguments, as they are passed on.
template <typename Mod, typename Args>
FLASH_HOST_DEVICE const ModOfLaunch<Mod> &mod_of(const Args &args) {
    return static_cast<const ArgsWithMod<Args, Mod> &>(args).mod;
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

// With dropout, what dS is made of is below 0 where a weight is dropped, if it can't be so otherwise.
template <typename Mod>
constexpr bool signs_dropped() {
    return drops_weights<Mod> && !scales_gradients<Mod>();
}

}  // namespace flash
