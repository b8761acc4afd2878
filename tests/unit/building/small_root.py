"""Sources whose kernel is small: a second to compile instead of several."""

from __future__ import annotations

import shutil
from pathlib import Path

from flash_helpers.build.sources import include_root
from flash_helpers.kernels.families import DIRECTIONS

# Same record as the real launcher's, around a kernel that compiles in a second and writes nothing.
_SMALL_LAUNCHER = """
#pragma once
#include <cuda_runtime.h>
#include "ampere/inner.cuh"
#include "flash_attention.cuh"
namespace flash::ampere {
template <FlashForwardKernelConfig CFG, ForwardTraits TRAITS, int kTarget>
constexpr ForwardKernelRecord<FlashForwardKernelConfig> make_record() {
    return {
        .config = CFG, .traits = TRAITS, .target = kTarget,
        .n_threads = 32 * CFG.n_warps, .smem_bytes = CFG.d_head * 2 * (CFG.B_r + 2 * CFG.B_c),
        .load = [] { return int(cudaFuncSetAttribute(reinterpret_cast<const void *>(&do_nothing<CFG.d_head>),
                                cudaFuncAttributeMaxDynamicSharedMemorySize, 1024)); },
        .launch = [](const ForwardProblem &problem, void *stream) {
            do_nothing<CFG.d_head><<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>(problem.softmax_scale);
            return int(cudaGetLastError());
        },
        .attributes = [](KernelAttributes &out) {
            cudaFuncAttributes a;
            const auto kernel = reinterpret_cast<const void *>(&do_nothing<CFG.d_head>);
            const int error = cudaFuncGetAttributes(&a, kernel);
            out.registers = a.numRegs;
            return error;
        },
    };
}
}
"""
_SMALL_KERNEL = """
#pragma once
namespace flash::ampere {
template <int D> __global__ void do_nothing(float scale) { if (scale > D) __trap(); }
}
"""


def make_small_root(root: Path) -> Path:
    """Writes an include root: Ampere's forward kernel does nothing, every other launcher is empty."""
    root.mkdir(parents=True)
    for header in include_root().glob("*.cuh"):
        shutil.copy(header, root)
    shutil.copytree(include_root() / "generated", root / "generated")
    for direction in DIRECTIONS:
        launcher = root / direction.launcher_header
        launcher.parent.mkdir(parents=True)
        launcher.write_text("#pragma once\n")
    (root / "ampere" / "forward" / "launcher.cuh").write_text(_SMALL_LAUNCHER)
    (root / "ampere" / "inner.cuh").write_text(_SMALL_KERNEL)
    return root
