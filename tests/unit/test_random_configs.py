"""Configurations and traits drawn at random: what Python calls feasible, C++ does not refuse.

The configuration headers need no CUDA, so that one run of the host's compiler judges all of them. Draws are
the same in every run.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from flash_helpers.build.sources import include_root
from flash_helpers.kernel_configs import (
    DType,
    FlashForwardKernelConfig,
    ForwardKernel,
    ForwardTraits,
    HopperForwardKernelConfig,
    NextItem,
    SoftmaxReference,
    device_facts,
    get_ampere_best_kernels,
    get_hopper_best_kernels,
)
from flash_helpers.kernels.ampere.backward.config import DQSum, DQWarps, FlashBackwardKernelConfig
from flash_helpers.kernels.hopper.backward import resources as hopper_backward_resources
from flash_helpers.kernels.hopper.backward.config import HopperBackwardKernelConfig
from flash_helpers.kernels.hopper.backward.resources import DqOutput
from flash_helpers.kernels.hopper.backward.rules import DQ_KEYS
from flash_helpers.kernels.hopper.forward.rules import D_HEADS as HOPPER_D_HEADS
from flash_helpers.kernels.hopper.forward.rules import PRODUCT_WIDTHS
from flash_helpers.kernels.kernel import ForwardConfig
from flash_helpers.kernels.traits import BackwardTraits

pytestmark = pytest.mark.compile

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


def draw_ampere_backward(rng: random.Random) -> FlashBackwardKernelConfig:
    """Any fields, with or without a kernel that makes dQ."""
    flag, pick = (lambda: rng.random() < 0.5), rng.choice
    own = flag()
    dq = (32 * rng.randint(1, 8), 16 * rng.randint(1, 6), pick([2, 4, 6, 8, 16])) if own else (0, 0, 0)
    return FlashBackwardKernelConfig(
        pick(list(DType)), pick([64, 128, 192, 256]), pick([64, 128, 192, 256]), pick([32, 64, 128]),
        16 * rng.randint(1, 16), pick([2, 4, 6, 8, 12, 16]), flag(), rng.randint(1, 4), rng.randint(1, 3),
        flag(), flag(), flag(), pick(list(DQWarps)),
        DQSum.OWN_KERNEL if own else pick([DQSum.ATOMIC, DQSum.ORDERED]), *dq,
    )  # fmt: skip


def draw_hopper_backward(rng: random.Random) -> HopperBackwardKernelConfig:
    """Fields that often go together."""
    flag, pick = (lambda: rng.random() < 0.5), rng.choice
    dq_output, d_head, split = pick(list(DqOutput)), pick([64, 96, 128, 192, 256]), flag()
    own = dq_output == DqOutput.OWN_KERNEL
    return HopperBackwardKernelConfig(
        pick(list(DType)), d_head, pick([64, 96, 128, 192, 256]), pick([64, 128]), 64 if split else 128,
        rng.randint(2, 3), rng.randint(1, 2), rng.randint(1, 2), dq_output, not own and flag(), flag(),
        flag(), flag(), flag(), flag(), flag(), flag(), split, pick(DQ_KEYS) if own else 0,
    )  # fmt: skip


def draw_traits(rng: random.Random) -> ForwardTraits:
    """Any features."""
    return ForwardTraits(*(rng.random() < 0.3 for _ in fields(ForwardTraits)))


def draw_backward_traits(rng: random.Random) -> BackwardTraits:
    """Any features that some kernel has together."""
    while True:
        traits = BackwardTraits(*(rng.random() < 0.3 for _ in fields(BackwardTraits)))
        if traits.float_obstacle() is None:
            return traits


def draw_kernel(draw: Callable[[random.Random], ForwardConfig], rng: random.Random) -> ForwardKernel:
    """A feasible kernel."""
    while True:
        kernel = ForwardKernel(draw(rng), draw_traits(rng))
        if kernel.infeasible_reason(H100) is None:
            return kernel


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
        kernel = draw_kernel(draw_ampere, rng)
        config, traits = kernel.config, kernel.traits.to_cpp_struct()
        lines.append(f"constexpr FlashForwardKernelConfig config_{i} = {config.to_cpp_struct()};")
        lines.append(f"using Kernel_{i} = StaticForwardKernelConfig<config_{i}, {traits}>;")
        lines.append(f"static_assert(Kernel_{i}::smem_bytes == {config.smem_bytes()});")
        if config.softmax_reference == SoftmaxReference.ANCHORED:
            anchored += 1
            exact = f"StaticForwardKernelConfig<with_exact_softmax(config_{i}), {traits}>"
            lines.append(f"static_assert({exact}::smem_bytes <= Kernel_{i}::smem_bytes);")
    assert anchored > 10
    assert host_errors("\n".join(lines), tmp_path) == ""


def test_ampere_backward(tmp_path: Path) -> None:
    """Every draw that Python calls well-formed; what does not fit the GPU is compiled too."""
    rng = random.Random(7)
    lines = ['#include "ampere/backward/static_dq_configuration.cuh"', "using namespace flash::ampere;"]
    seen: Counter[DQSum] = Counter()
    for i in range(COUNT):
        traits = draw_backward_traits(rng)
        config = draw_ampere_backward(rng)
        while config.malformed_reason(traits):
            config = draw_ampere_backward(rng)
        seen[config.dq_sum] += 1
        given = f"config_{i}, {traits.to_cpp_struct()}"
        lines.append(f"constexpr FlashBackwardKernelConfig config_{i} = {config.to_cpp_struct()};")
        lines.append(f"using Kernel_{i} = StaticBackwardKernelConfig<{given}>;")
        lines.append(f"static_assert(Kernel_{i}::smem_bytes == {config.smem_bytes_for(traits)});")
        if config.has_dq_kernel:
            own = f"StaticQueryGradientConfig<{given}>"
            lines.append(f"static_assert({own}::smem_bytes == {config.dq_smem_bytes()});")
    assert min(seen[how] for how in DQSum) > 10
    assert host_errors("\n".join(lines), tmp_path) == ""


def test_hopper(tmp_path: Path) -> None:
    rng = random.Random(6)
    lines = ['#include "hopper/forward/static_kernel_configuration.cuh"', "using namespace flash::hopper;"]
    for i in range(COUNT):
        kernel = draw_kernel(draw_hopper, rng)
        config, traits = kernel.config, kernel.traits.to_cpp_struct()
        producer, consumer = config.register_budget(kernel.traits)
        lines.append(f"constexpr HopperForwardKernelConfig config_{i} = {config.to_cpp_struct()};")
        lines.append(f"using Kernel_{i} = StaticForwardKernelConfig<config_{i}, {traits}>;")
        lines.append(f"static_assert(Kernel_{i}::smem_bytes == {config.smem_bytes()});")
        lines.append(f"static_assert(Kernel_{i}::registers.producer == {producer});")
        lines.append(f"static_assert(Kernel_{i}::registers.consumer == {consumer});")
    assert host_errors("\n".join(lines), tmp_path) == ""


def test_hopper_backward(tmp_path: Path) -> None:
    rng = random.Random(8)
    lines = ['#include "hopper/backward/static_dq_configuration.cuh"', "using namespace flash::hopper;"]
    seen: Counter[DqOutput] = Counter()
    for i in range(COUNT):
        traits = draw_backward_traits(rng)
        config = draw_hopper_backward(rng)
        while config.infeasible_reason(H100, traits):
            config = draw_hopper_backward(rng)
        seen[config.dq_output] += 1
        given = f"config_{i}, {traits.to_cpp_struct()}"
        smem = hopper_backward_resources.smem_bytes(config)
        registers = hopper_backward_resources.consumer_registers(config)
        lines.append(f"constexpr HopperBackwardKernelConfig config_{i} = {config.to_cpp_struct()};")
        lines.append(f"using Kernel_{i} = StaticBackwardKernelConfig<{given}>;")
        lines.append(f"static_assert(Kernel_{i}::smem_bytes == {smem});")
        lines.append(f"static_assert(Kernel_{i}::consumer_registers == {registers});")
        lines.append(f"static_assert(Kernel_{i}::n_threads == {config.n_threads});")
        if config.dq_output == DqOutput.OWN_KERNEL:
            own = f"StaticDqKernelConfig<{given}>"
            lines.append(
                f"static_assert({own}::smem_bytes == {hopper_backward_resources.dq_smem_bytes(config)});"
            )
    assert min(seen[how] for how in DqOutput) > 5
    assert host_errors("\n".join(lines), tmp_path) == ""


def test_python_refuses_first_what_cpp_refuses_of_traits(tmp_path: Path) -> None:
    """Each rule about traits: the kernel is fine without the trait, and refused by both with it."""
    config = FlashForwardKernelConfig(
        DType.BF16, 128, 128, 64, 4, True, True, True, 0, 1, 1, False, True,
        softmax_reference=SoftmaxReference.EXACT_SKIP_RESCALE, fragments_ahead=2,
    )  # fmt: skip
    split, paged = ForwardTraits(split=True), ForwardTraits(varlen=True, paged=True)
    refused = [
        (replace(config, paired_warps=True), split, "paired_warps"),
        (replace(config, softmax_reference=SoftmaxReference.ANCHORED), split, "ANCHORED"),
        (replace(config, tensor_row_sums=True), split, "tensor_row_sums"),
        (replace(config, async_copy=False, eager_load_blocks=False), paged, "async_copy"),
    ]
    for i, (bad, traits, word) in enumerate(refused):
        assert bad.malformed_reason() is None
        assert word in (bad.malformed_reason(traits) or "")
        source = (
            '#include "ampere/forward/static_kernel_configuration.cuh"\nusing namespace flash::ampere;\n'
            f"constexpr FlashForwardKernelConfig config = {bad.to_cpp_struct()};\n"
            f"static_assert(StaticForwardKernelConfig<config, {traits.to_cpp_struct()}>::smem_bytes > 0);\n"
        )
        assert word in host_errors(source, tmp_path), i


def test_registers_of_a_consumer_are_those_that_its_traits_leave() -> None:
    """With 128 rows and 176 keys S, P and O fit beside 232 registers; sequences' own warp leaves 216."""
    config = HopperForwardKernelConfig(
        DType.BF16, 128, 128, 128, 176, 2, 1, True, True, SoftmaxReference.LAGGED, False, NextItem.NONE,
        False, False, False,
    )  # fmt: skip
    assert config.infeasible_reason(H100) is None
    assert "of a kernel for varlen leave 192" in (config.malformed_reason(ForwardTraits(varlen=True)) or "")
    assert "of a kernel for split leave 192" in (config.malformed_reason(ForwardTraits(split=True)) or "")


def test_every_kernel_of_the_sets_is_feasible_with_its_traits() -> None:
    kernels = [*get_hopper_best_kernels(), *get_ampere_best_kernels()]
    assert len(kernels) > 100
    assert [kernel.short_form() for kernel in kernels if kernel.malformed_reason()] == []
