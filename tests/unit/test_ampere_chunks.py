"""Ampere kernels of ``numerics="invariant"`` with chunks of keys do not spill; their steady loops do the same
work as without.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flash_helpers.build import BuildResult, KernelCache, build_library
from flash_helpers.build.gates import machine_code
from flash_helpers.build.main_loop import main_loop
from flash_helpers.build.sass import find_tool
from flash_helpers.kernel_configs import DType, ForwardKernel, device_facts
from flash_helpers.kernels.ampere.forward.config import KEPT_BLOCKS
from flash_helpers.kernels.ampere.forward.invariant import CHUNK_KEYS, KEY_TILES, invariant_choice
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.select.candidates import kernel_for

INCLUDE = Path(__file__).parents[2] / "src/include"
A100 = device_facts("A100")
SERVED = {"varlen": True, "cached": True, "paged": True}
PROMPTS: dict[str, dict[str, Any]] = {
    "causal": {"right": 0},
    "window": {"left": 300, "right": 0, "softcap": True, "sinks": True},
    "packed": {"right": 0, "varlen": True},
    "no mask": {},
    "packed window in pages": {"left": 300, "right": 0, **SERVED},
    "planned": {"right": 0, "planned": True, **SERVED},
}


def kernel(d_head: int, d_tensor: int, n_rows: int, in_parts: bool = False, **changes: Any) -> ForwardKernel:
    """The kernel for an A100."""
    problem = AttentionProblem(DType.BF16, 2, n_rows, 8192, 8, 8, d_tensor, d_tensor, invariant=True)
    problem = replace(problem, **changes)
    found = kernel_for(invariant_choice(problem, d_head, A100, in_parts)[0], problem)
    assert isinstance(found, ForwardKernel)
    return replace(found, traits=replace(found.traits, split=in_parts))


WORK = ("HMMA", "LDSM", "MUFU", "FFMA", "FMUL", "FADD", "FMNMX", "F2FP", "SHFL", "LDGSTS")
SIZES = {64: (64,), 128: (96, 128), 256: (192, 256)}  # of the kernel: of tensors
CUT = [
    *(kernel(d, t, 4096, **PROMPTS["causal"]) for d, tensors in SIZES.items() for t in tensors),
    *(kernel(d, d, 4096, **changes) for d in SIZES for name, changes in PROMPTS.items() if name != "causal"),
    *(kernel(d, d, rows, in_parts=True, right=0, **SERVED) for d in SIZES for rows in (8, 4096)),
    *(kernel(d, d, 8, **PROMPTS["planned"]) for d in SIZES),
]
PAIRS = [  # beside the same without chunks
    (k, replace(k, config=replace(k.config, chunk_tiles=0)))
    for k in (
        kernel(64, 64, 4096, right=0),
        kernel(128, 128, 4096, right=0),
        kernel(64, 64, 8, in_parts=True, right=0, **SERVED),
    )
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    kernels = [*CUT, *(whole for _, whole in PAIRS)]
    return build_library(
        list(dict.fromkeys(kernels)), 80, cache=KernelCache(tmp_path_factory.mktemp("cache"))
    )


def test_all_kernels_have_chunks_of_whole_tiles() -> None:
    for tile in KEY_TILES.values():
        assert CHUNK_KEYS % tile == 0
    assert {k.config.chunk_tiles * k.config.B_c for k in CUT} == {CHUNK_KEYS}


def test_memory_for_kept_chunks_is_that_of_as_many_blocks_as_the_launcher_runs() -> None:
    header = INCLUDE / "ampere/forward/static_kernel_configuration.cuh"
    text = header.read_text(encoding="utf-8")
    (blocks,) = re.findall(r"int kKeptBlocks = (\d+);", text)
    (more, element_bytes) = re.findall(r"int kept_bytes = B_r \* \(d_head \+ (\d+)\) \* (\d+);", text)[0]
    assert int(blocks) == KEPT_BLOCKS
    for k in CUT:
        of_block = k.config.B_r * (k.config.d_head + int(more)) * int(element_bytes)
        assert 4 * k.config.kept_sums(7) == 7 * KEPT_BLOCKS * of_block


@pytest.mark.compile
def test_ptxas_does_not_spill(built: BuildResult) -> None:
    spilled = {c.kernel.short_form(): c.spill_bytes for c in built.kernels if c.spill_bytes}
    assert spilled == {}


@pytest.mark.compile
@pytest.mark.skipif(find_tool("cuobjdump") is None, reason="there is no cuobjdump")
@pytest.mark.parametrize(("cut", "whole"), PAIRS, ids=lambda k: k.short_form())
def test_the_steady_loop_does_the_same_work(
    built: BuildResult, cut: ForwardKernel, whole: ForwardKernel
) -> None:
    code = machine_code(built.path, [cut, whole])
    with_chunks, without = (Counter(i.name for i in main_loop(code[k])) for k in (cut, whole))
    assert without["HMMA"] > 0
    assert {name: with_chunks[name] for name in WORK} == {name: without[name] for name in WORK}
    assert with_chunks.total() <= 1.02 * without.total()  # integers of addresses and bounds
