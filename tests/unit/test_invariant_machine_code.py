"""Kernels of ``numerics="invariant"`` with pieces of keys: no spills but those that docs/choosing.md says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from flash_helpers.build import BuildResult, KernelCache, build_library
from flash_helpers.build.ptxas import parse_ptxas
from flash_helpers.kernel_configs import ForwardKernel, ForwardTraits
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.hopper.forward.invariant import INVARIANT

CHOOSING = Path(__file__).parents[2] / "docs" / "choosing.md"


def kernel(config: HopperForwardKernelConfig, *names: str) -> ForwardKernel:
    dynamic = {"causal", "varlen"} & {*names}
    return ForwardKernel(
        replace(config, dynamic_schedule=bool(dynamic)), ForwardTraits(**dict.fromkeys(names, True))
    )


NARROW = kernel(INVARIANT[64, 64].many, "causal")
KERNELS = [
    NARROW,
    kernel(INVARIANT[128, 128].many, "causal"),
    kernel(INVARIANT[128, 128].long),
    kernel(INVARIANT[192, 192].many, "causal"),
    kernel(INVARIANT[256, 256].few),
    kernel(replace(INVARIANT[256, 256].few, keys_once=True), "varlen", "split", "paged"),
    kernel(replace(INVARIANT[64, 64].few, keys_once=True), "varlen"),
    kernel(INVARIANT[256, 256].few, "causal", "varlen", "paged", "planned"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    return build_library(KERNELS, 90, cache=KernelCache(tmp_path_factory.mktemp("cache")))


@pytest.mark.compile
def test_ptxas_neither_spills_nor_serializes(built: BuildResult) -> None:
    reports = {compiled.kernel: parse_ptxas(compiled.log) for compiled in built.kernels}
    assert {k: r.warnings for k, r in reports.items()} == dict.fromkeys(KERNELS, ())
    (said,) = re.findall(r"192 x 128, spills (\d+) bytes", CHOOSING.read_text(encoding="utf-8"))
    wanted = dict.fromkeys(KERNELS, 0) | {NARROW: int(said)}
    assert {k: r.spill_bytes for k, r in reports.items()} == wanted
