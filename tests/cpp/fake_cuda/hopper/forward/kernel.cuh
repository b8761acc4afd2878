// In the place of the Hopper family's kernels: what a launch names of them. No launch runs them.
#pragma once

#include "common/ptx.cuh"
#include "hopper/forward/kernel_args.cuh"
#include "hopper/forward/static_kernel_configuration.cuh"
#include "launch_rules.hpp"

namespace flash::hopper {

template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS>
void hopper_forward_kernel(CUtensorMap, CUtensorMap, CUtensorMap, CUtensorMap, ForwardKernelArgs args) {
    static_assert(4 * sizeof(CUtensorMap) + sizeof args <= kMostParameterBytes);
}

template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS, typename MOD>
void hopper_forward_mod_kernel(CUtensorMap, CUtensorMap, CUtensorMap, CUtensorMap, KernelArgs<MOD> args) {
    static_assert(4 * sizeof(CUtensorMap) + sizeof args <= kMostParameterBytes);
}

template <HopperForwardKernelConfig CFG, ForwardTraits TRAITS, typename MOD>
void hopper_forward_streaming_kernel(CUtensorMap, CUtensorMap, CUtensorMap, CUtensorMap, CUtensorMap,
                                     KernelArgs<MOD> args) {
    static_assert(5 * sizeof(CUtensorMap) + sizeof args <= kMostParameterBytes);
}

}  // namespace flash::hopper
