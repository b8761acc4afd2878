// Functions of the user's in a kernel: what a generated mod (flash_helpers/mods/cpp.py) has, and what stands
// where there is none.
//
//     kSignature                             which mod it is, and how much it captures
//     struct Captured                        what it captures; captured(…) makes it of a launch's arguments
//     struct Once, Head, Row, Column         values by what they depend on, and functions of the same names
//     kChangesScores, kHidesKeys             which of the two functions below there are
//     float score(…), bool visible(…)
#pragma once

#include <type_traits>

#include "mod_arguments.cuh"

namespace flash {

struct NoMod {};

template <typename Mod>
inline constexpr bool is_mod = !std::is_same_v<Mod, NoMod>;

// Of a kernel's record.
template <typename Mod>
constexpr ModSignature signature_of() {
    if constexpr (is_mod<Mod>) return Mod::kSignature;
    return {};
}

}  // namespace flash
