"""Fixtures of the tests that build: a small kernel in place of the real ones, and a cache of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flash_helpers.build import KernelCache
from flash_helpers.build.nvcc import Nvcc
from flash_helpers.build.sources import include_root
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig, ForwardKernel

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


@pytest.fixture
def config() -> FlashForwardKernelConfig:
    return FlashForwardKernelConfig(DType.FP16, 128, 64, 64, 4, True, True, True, 0, 2, 2, True, True)


@pytest.fixture
def kernel(config: FlashForwardKernelConfig) -> ForwardKernel:
    return ForwardKernel(config)


@pytest.fixture
def small_root(tmp_path: Path) -> Path:
    """An include root whose kernel is small."""
    return make_small_root(tmp_path / "include")


def make_small_root(root: Path) -> Path:
    """Writes an include root whose ampere kernel does nothing."""
    (root / "ampere").mkdir(parents=True)
    shutil.copy(include_root() / "flash_attention.cuh", root)
    (root / "ampere" / "forward_launcher.cuh").write_text(_SMALL_LAUNCHER)
    (root / "ampere" / "inner.cuh").write_text(_SMALL_KERNEL)
    (root / "hopper").mkdir()
    (root / "hopper" / "forward_launcher.cuh").write_text("#pragma once\n")
    return root


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache")


class FakeNvcc:
    """A shell script in place of nvcc: copies or waits, and counts its calls in ``calls``."""

    def __init__(self, folder: Path, body: str = "", seconds: float = 0.0) -> None:
        self.calls_file = folder / "calls"
        self.path = folder / "nvcc"
        folder.mkdir(parents=True, exist_ok=True)
        # The output is made in two steps, as a compiler's is, so that a killed one leaves half a file.
        self.path.write_text(
            "#!/bin/sh\n"
            'if [ "$1" = --version ]; then echo "release 13.0, V13.0.88"; exit 0; fi\n'
            f"{body}\n"
            'for word in "$@"; do previous=$last; last=$word; [ "$previous" = -o ] && output=$word; done\n'
            f'echo "$output" >> {self.calls_file}\n'
            'printf half > "$output"\n'
            f"sleep {seconds}\n"
            'printf " whole" >> "$output"\n'
            'echo "ptxas info    : Used 32 registers, used 1 barriers"\n'
        )
        self.path.chmod(0o755)

    @property
    def nvcc(self) -> Nvcc:
        return Nvcc(self.path, (13, 0), "13.0.88")

    @property
    def calls(self) -> list[str]:
        """The output file names of every compilation and link so far."""
        return self.calls_file.read_text().split() if self.calls_file.exists() else []


@pytest.fixture
def fake_nvcc(tmp_path: Path) -> FakeNvcc:
    return FakeNvcc(tmp_path / "toolkit")
