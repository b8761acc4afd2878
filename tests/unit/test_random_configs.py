"""Configurations drawn at random: what Python calls feasible, C++ does not refuse.

The configuration headers need no CUDA, so that one run of the host's compiler judges all of them. Draws are
the same in every run.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

from flash_helpers.build.sources import include_root
from flash_helpers.kernel_configs import (
    DType,
    FlashForwardKernelConfig,
    HopperForwardKernelConfig,
    NextItem,
    SoftmaxReference,
    device_facts,
)
from flash_helpers.kernels.hopper.forward.config import D_HEADS as HOPPER_D_HEADS
from flash_helpers.kernels.hopper.forward.config import PRODUCT_WIDTHS

COUNT = 150  # feasible ones of each family; 1 of 40 draws is
H100 = device_facts("H100")


def draw_ampere(rng: random.Random) -> FlashForwardKernelConfig:
    """Any fields, but loads that go with fragments_ahead."""
    flag, pick = (lambda: rng.random() < 0.5), rng.choice
    ahead = pick([0, 0, 1, 2, 4])
    tiles = [1, 1, 1] if ahead else [pick([0, 1, 2, 4]) for _ in range(3)]
    return FlashForwardKernelConfig(
        pick(list(DType)), pick([64, 128, 192, 256]), 16 * rng.randint(1, 64), 16 * rng.randint(1, 16),
        pick([1, 2, 3, 4, 6, 8, 12, 16, 32, 34, 64]), rng.random() < 0.9, flag(), flag(), *tiles,
        not ahead and flag(), rng.random() < 0.9, pick([1, 2, 3]), flag(), pick(list(SoftmaxReference)),
        flag(), ahead, flag(),
    )  # fmt: skip


def draw_hopper(rng: random.Random) -> HopperForwardKernelConfig:
    """Any fields."""
    flag, pick = (lambda: rng.random() < 0.5), rng.choice
    return HopperForwardKernelConfig(
        pick(list(DType)), pick(HOPPER_D_HEADS), pick(HOPPER_D_HEADS), 64 * rng.randint(1, 4),
        pick(PRODUCT_WIDTHS), rng.randint(2, 4), rng.randint(1, 3), rng.random() < 0.8, flag(),
        pick(list(SoftmaxReference)), flag(), pick(list(NextItem)), flag(), flag(), flag(), flag(), flag(),
        flag(), flag(), pick([0, 0, 4]), pick([0, 0, 2]), pick([0, 0, 1]), pick([0, 0, 2]),
    )  # fmt: skip


def host_errors(source: str, folder: Path) -> str:
    """What the host's compiler says about a translation unit."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    assert compiler, "no C++ compiler found: install g++ or clang++, or set CXX"
    (folder / "source.cpp").write_text(source)
    command = [*compiler.split(), "-std=c++20", "-fsyntax-only", f"-I{include_root()}", "source.cpp"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stderr


def test_ampere(tmp_path: Path) -> None:
    rng = random.Random(5)
    lines = ['#include "ampere/forward/static_kernel_configuration.cuh"', "using namespace flash::ampere;"]
    anchored = 0
    for i in range(COUNT):
        while (config := draw_ampere(rng)).infeasible_reason(H100):
            pass
        lines.append(f"constexpr FlashForwardKernelConfig config_{i} = {config.to_cpp_struct()};")
        lines.append(f"using Kernel_{i} = StaticForwardKernelConfig<config_{i}, ForwardTraits{{}}>;")
        lines.append(f"static_assert(Kernel_{i}::smem_bytes == {config.smem_bytes()});")
        if config.softmax_reference == SoftmaxReference.ANCHORED:
            anchored += 1
            exact = f"StaticForwardKernelConfig<with_exact_softmax(config_{i}), ForwardTraits{{}}>"
            lines.append(f"static_assert({exact}::smem_bytes <= Kernel_{i}::smem_bytes);")
    assert anchored > 10
    assert host_errors("\n".join(lines), tmp_path) == ""


def test_hopper(tmp_path: Path) -> None:
    rng = random.Random(6)
    lines = ['#include "hopper/forward/static_kernel_configuration.cuh"', "using namespace flash::hopper;"]
    for i in range(COUNT):
        while (config := draw_hopper(rng)).infeasible_reason(H100):
            pass
        lines.append(f"constexpr HopperForwardKernelConfig config_{i} = {config.to_cpp_struct()};")
        for causal in ("false", "true"):
            static = f"StaticForwardKernelConfig<config_{i}, ForwardTraits{{.causal = {causal}}}>"
            lines.append(f"static_assert({static}::smem_bytes == {config.smem_bytes()});")
    assert host_errors("\n".join(lines), tmp_path) == ""
