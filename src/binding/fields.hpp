// The fields of every struct that crosses from Python to C++.
//
// One list a struct serves the reader (struct_reader.hpp), the names that Python can ask for, and the
// compile-time check that the list is complete. The Python dataclass of the same name has the same fields in
// the same order. A new family adds its Description and its name in `Configs`.
#pragma once

#include <array>
#include <cstddef>
#include <tuple>

#include "flash_attention.cuh"

namespace flash::binding {

template <typename Struct, typename Member>
struct Field {
    const char *name;
    Member Struct::*member;
};

template <typename Struct>
struct Description;

#define FLASH_FIELD(Struct, field) \
    Field<Struct, decltype(Struct::field)> { #field, &Struct::field }

template <>
struct Description<FlashForwardKernelConfig> {
    static constexpr const char *name = "FlashForwardKernelConfig";
    static constexpr const char *family = "ampere";
    static constexpr std::tuple fields{
        FLASH_FIELD(FlashForwardKernelConfig, dtype),
        FLASH_FIELD(FlashForwardKernelConfig, d_head),
        FLASH_FIELD(FlashForwardKernelConfig, B_r),
        FLASH_FIELD(FlashForwardKernelConfig, B_c),
        FLASH_FIELD(FlashForwardKernelConfig, n_warps),
        FLASH_FIELD(FlashForwardKernelConfig, async_copy),
        FLASH_FIELD(FlashForwardKernelConfig, eager_load_blocks),
        FLASH_FIELD(FlashForwardKernelConfig, swizzled),
        FLASH_FIELD(FlashForwardKernelConfig, Q_mma_load_K_tiles),
        FLASH_FIELD(FlashForwardKernelConfig, K_mma_load_K_tiles),
        FLASH_FIELD(FlashForwardKernelConfig, V_mma_load_K_tiles),
        FLASH_FIELD(FlashForwardKernelConfig, mma_double_buffer_loads),
        FLASH_FIELD(FlashForwardKernelConfig, optimized_softmax),
        FLASH_FIELD(FlashForwardKernelConfig, kv_stages),
        FLASH_FIELD(FlashForwardKernelConfig, mbarrier),
        FLASH_FIELD(FlashForwardKernelConfig, softmax_reference),
        FLASH_FIELD(FlashForwardKernelConfig, tensor_row_sums),
        FLASH_FIELD(FlashForwardKernelConfig, fragments_ahead),
        FLASH_FIELD(FlashForwardKernelConfig, paired_warps),
    };
};

template <>
struct Description<HopperForwardKernelConfig> {
    static constexpr const char *name = "HopperForwardKernelConfig";
    static constexpr const char *family = "hopper";
    static constexpr std::tuple fields{
        FLASH_FIELD(HopperForwardKernelConfig, dtype),
        FLASH_FIELD(HopperForwardKernelConfig, d_head),
        FLASH_FIELD(HopperForwardKernelConfig, d_head_v),
        FLASH_FIELD(HopperForwardKernelConfig, B_r),
        FLASH_FIELD(HopperForwardKernelConfig, B_c),
        FLASH_FIELD(HopperForwardKernelConfig, kv_stages),
        FLASH_FIELD(HopperForwardKernelConfig, q_stages),
        FLASH_FIELD(HopperForwardKernelConfig, overlap_products),
        FLASH_FIELD(HopperForwardKernelConfig, ping_pong),
        FLASH_FIELD(HopperForwardKernelConfig, softmax_reference),
        FLASH_FIELD(HopperForwardKernelConfig, forced_overlap),
        FLASH_FIELD(HopperForwardKernelConfig, next_item),
        FLASH_FIELD(HopperForwardKernelConfig, direct_store),
        FLASH_FIELD(HopperForwardKernelConfig, dynamic_schedule),
        FLASH_FIELD(HopperForwardKernelConfig, head_sections),
        FLASH_FIELD(HopperForwardKernelConfig, early_pass),
        FLASH_FIELD(HopperForwardKernelConfig, trimmed),
        FLASH_FIELD(HopperForwardKernelConfig, paired_blocks),
        FLASH_FIELD(HopperForwardKernelConfig, half_tiles),
        FLASH_FIELD(HopperForwardKernelConfig, section_heads),
        FLASH_FIELD(HopperForwardKernelConfig, prefetch_next),
        FLASH_FIELD(HopperForwardKernelConfig, extra_k_stages),
        FLASH_FIELD(HopperForwardKernelConfig, q_register_steps),
    };
};

template <>
struct Description<ForwardTraits> {
    static constexpr const char *name = "ForwardTraits";
    static constexpr std::tuple fields{
        FLASH_FIELD(ForwardTraits, causal),      FLASH_FIELD(ForwardTraits, window),
        FLASH_FIELD(ForwardTraits, softcap),     FLASH_FIELD(ForwardTraits, sinks),
        FLASH_FIELD(ForwardTraits, varlen),      FLASH_FIELD(ForwardTraits, split),
        FLASH_FIELD(ForwardTraits, padded_head), FLASH_FIELD(ForwardTraits, paged),
    };
};

#undef FLASH_FIELD

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

constexpr auto describe(DType) { return enumeration("DType", DType::FP16, DType::BF16); }
constexpr auto describe(SoftmaxReference) {
    using enum SoftmaxReference;
    return enumeration("SoftmaxReference", EXACT, EXACT_SKIP_RESCALE, LAGGED, ANCHORED);
}
constexpr auto describe(NextItem) {
    using enum NextItem;
    return enumeration("NextItem", NONE, WITH_LAST_PV, AFTER_LAST_PV);
}

// The configuration struct of each family.
using Configs = std::tuple<FlashForwardKernelConfig, HopperForwardKernelConfig>;

// Calls f.operator()<Config>() for each family until one returns true; says whether one did.
template <typename F>
bool any_config(F f) {
    return [&]<typename... Config>(const std::tuple<Config...> *) {
        return (f.template operator()<Config>() || ...);
    }(static_cast<const Configs *>(nullptr));
}

// ---------------------------------------------------------------- completeness
struct Anything {
    template <typename T>
    constexpr operator T() const;
};

template <typename Struct, typename... Members>
consteval int count_members() {
    if constexpr (requires { Struct{Members{}..., Anything{}}; }) {
        return count_members<Struct, Members..., Anything>();
    } else {
        return sizeof...(Members);
    }
}

template <typename Struct>
inline constexpr bool lists_every_field =
    count_members<Struct>() == std::tuple_size_v<decltype(Description<Struct>::fields)>;

static_assert(lists_every_field<FlashForwardKernelConfig>, "Description lacks a field of the struct");
static_assert(lists_every_field<HopperForwardKernelConfig>, "Description lacks a field of the struct");
static_assert(lists_every_field<ForwardTraits>, "Description lacks a field of the struct");

}  // namespace flash::binding
