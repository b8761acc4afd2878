// In the place of the Ampere family's kernels: what a launch names of them. No launch runs them.
#pragma once

#include "ampere/forward/kernel_args.cuh"
#include "ampere/forward/static_kernel_configuration.cuh"
#include "common/ptx.cuh"
#include "launch_rules.hpp"

namespace flash::ampere {

template <FlashForwardKernelConfig CFG, ForwardTraits TRAITS>
void flash_forward_kernel(ForwardKernelArgs args) {
    static_assert(sizeof args <= kMostParameterBytes);
}

template <FlashForwardKernelConfig CFG, ForwardTraits TRAITS, typename MOD>
void flash_forward_mod_kernel(KernelArgs<MOD> args) {
    static_assert(sizeof args <= kMostParameterBytes);
}

}  // namespace flash::ampere
