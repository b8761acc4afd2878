// The host side of one backward kernel: launch, resources, and its record.
//
// A generated translation unit includes this file and defines one record with make_backward_record.
#pragma once

#include "backward.cuh"
#include "common/backward/plain.cuh"

namespace flash::hopper {

template <HopperBackwardKernelConfig CFG, BackwardTraits TRAITS, int kTarget>
constexpr BackwardKernelRecord<HopperBackwardKernelConfig> make_backward_record() {
    using Launcher = PlainBackwardLauncher<CFG, TRAITS>;
    return {
        .config = CFG,
        .traits = TRAITS,
        .target = kTarget,
        .n_threads = Launcher::kThreads,
        .smem_bytes = 0,
        .load = &Launcher::load,
        .launch = &Launcher::launch,
        .attributes = &Launcher::attributes,
        .workspaces = &Launcher::workspaces,
    };
}

}  // namespace flash::hopper
