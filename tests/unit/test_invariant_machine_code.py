"""Kernels of ``numerics="invariant"`` with pieces of keys: no spills, and steady loops as without pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flash_helpers.build import BuildResult, KernelCache, build_library
from flash_helpers.build.gates import code_of, machine_code
from flash_helpers.build.ptxas import parse_ptxas
from flash_helpers.build.sass import find_tool
from flash_helpers.kernel_configs import ForwardKernel, ForwardTraits
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.hopper.forward.gates import counts, violations
from flash_helpers.kernels.hopper.forward.invariant import INVARIANT


def kernel(config: HopperForwardKernelConfig, *names: str) -> ForwardKernel:
    dynamic = {"causal", "varlen"} & {*names}
    return ForwardKernel(
        replace(config, dynamic_schedule=bool(dynamic)), ForwardTraits(**dict.fromkeys(names, True))
    )


KERNELS = [
    kernel(INVARIANT[64, 64].many, "causal"),
    kernel(INVARIANT[64, 64].many),
    kernel(INVARIANT[64, 64].packed, "causal", "varlen", "paged", "planned"),
    kernel(INVARIANT[128, 128].many, "causal"),
    kernel(INVARIANT[128, 128].long),
    kernel(INVARIANT[192, 192].many, "causal"),
    kernel(INVARIANT[256, 256].few),
    kernel(replace(INVARIANT[256, 256].few, keys_once=True), "varlen", "split", "paged"),
    kernel(replace(INVARIANT[64, 64].few, keys_once=True), "varlen"),
    kernel(INVARIANT[256, 256].few, "causal", "varlen", "paged", "planned"),
]
# Those of prompts, beside the same without pieces.
PAIRS = [
    (k, replace(k, config=replace(k.config, chunk_tiles=0))) for k in (KERNELS[0], KERNELS[1], KERNELS[3])
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    kernels = [*KERNELS, *(whole for _, whole in PAIRS)]
    return build_library(kernels, 90, cache=KernelCache(tmp_path_factory.mktemp("cache")))


@pytest.mark.compile
def test_ptxas_neither_spills_nor_serializes(built: BuildResult) -> None:
    reports = {compiled.kernel: parse_ptxas(compiled.log) for compiled in built.kernels}
    assert {k: r.warnings for k, r in reports.items()} == dict.fromkeys(reports, ())
    assert {k: r.spill_bytes for k, r in reports.items()} == dict.fromkeys(reports, 0)


@pytest.mark.compile
@pytest.mark.skipif(find_tool("cuobjdump") is None, reason="there is no cuobjdump")
@pytest.mark.parametrize(("cut", "whole"), PAIRS, ids=lambda k: k.short_form())
def test_pieces_cost_the_steady_loop_nothing(
    built: BuildResult, cut: ForwardKernel, whole: ForwardKernel
) -> None:
    code = {
        c.kernel: code_of(c, machine_code(built.path, [c.kernel])[c.kernel])
        for c in built.kernels
        if c.kernel in (cut, whole)
    }
    with_pieces, without = counts(code[cut]), counts(code[whole])
    assert with_pieces.pop("total") <= without.pop("total")
    assert with_pieces == without
    assert isinstance(cut.config, HopperForwardKernelConfig)
    assert [v for v in violations(cut.config, code[cut]) if "record" not in v] == []
