// The fields of every struct that crosses from Python to C++.
//
// One list a struct serves the reader (struct_reader.hpp) and the names that Python can ask for. The lists
// are generated from the Python dataclasses of the same names, as the structs are.
#pragma once

#include <array>
#include <cstddef>
#include <tuple>

#include "backward.cuh"
#include "flash_attention.cuh"

namespace flash::binding {

template <typename Struct, typename Member>
struct Field {
    const char *name;
    Member Struct::*member;
};

template <typename Struct>
struct Description;

template <typename Struct, typename Member>
constexpr Field<Struct, Member> field(const char *name, Member Struct::*member) {
    return {name, member};
}

// The enumerations among the fields: name and numbers are those of the Python IntEnum.
template <std::size_t N>
struct EnumDescription {
    const char *name;
    std::array<long, N> numbers;
};

template <typename... Enum>
constexpr EnumDescription<sizeof...(Enum)> enumeration(const char *name, Enum... values) {
    return {name, {static_cast<long>(values)...}};
}

}  // namespace flash::binding

#include "generated/fields.hpp"

namespace flash::binding {

// Calls f.operator()<Config>() for each direction of each family until one returns true; says whether one
// did.
template <typename F>
bool any_config(F f) {
    return [&]<typename... Config>(const std::tuple<Config...> *) {
        return (f.template operator()<Config>() || ...);
    }(static_cast<const Configs *>(nullptr));
}

}  // namespace flash::binding
