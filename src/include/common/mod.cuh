// Functions of the user's in a kernel: what a generated mod (flash_helpers/mods/cpp.py) has, and what stands
// where there is none.
//
//     struct Captured                        arguments of the launch
//     struct Once, Head, Row, Column         values by what they depend on, and functions of the same names
//     kChangesScores, kHidesKeys             which of the two functions below there are
//     float score(…), bool visible(…)
#pragma once

#include <type_traits>

namespace flash {

struct NoMod {};

template <typename Mod>
inline constexpr bool is_mod = !std::is_same_v<Mod, NoMod>;

}  // namespace flash
