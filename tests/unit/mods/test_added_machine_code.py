"""Hopper kernels whose functions add what follows from the distance: their steady loops do little more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gallery import HEADS, alibi, t5_buckets

from flash_attention.mods.tracing import trace
from flash_helpers.build import KernelCache, build_library
from flash_helpers.build.main_loop import hot_path, main_loop
from flash_helpers.build.ptxas import parse_ptxas
from flash_helpers.build.sass import disassemble, find_tool, parse_functions
from flash_helpers.kernel_configs import DType, ForwardKernel, choose_hopper_kernel
from flash_helpers.kernels.gates import MachineCode
from flash_helpers.kernels.hopper.forward.gates import counts, violations

TABLE = torch.zeros(HEADS, 32)
FUNCTIONS = {"evenly": alibi(HEADS), "otherwise": t5_buckets(TABLE)}
LENGTH = 4096


def kernel(d_head: int, name: str) -> ForwardKernel:
    """What is chosen for a function."""
    found, _ = choose_hopper_kernel(DType.BF16, d_head, False, LENGTH, mod=True, steps=name == "evenly")
    return replace(found, mod=trace(FUNCTIONS[name], None).mod)


@pytest.mark.compile
@pytest.mark.skipif(find_tool("cuobjdump") is None, reason="there is no cuobjdump")
def test_steady_loops_are_little_longer(tmp_path: Path) -> None:
    def loop_of(found: ForwardKernel) -> dict[str, int]:
        built = build_library([found], 90, cache=KernelCache(tmp_path))
        report = parse_ptxas(built.kernels[0].log)
        assert report.warnings == ()
        # The two warps of a block of 256 queries have 32 registers.
        assert report.spill_bytes <= (64 if found.config.n_consumers == 4 else 0)
        functions = parse_functions(disassemble(built.path))
        (body,) = (body for name, body in functions.items() if "forward_mod_kernel" in name)
        loop = main_loop(body, found.config.products_per_block)
        code = MachineCode(report.warnings, 0, body, loop, hot_path(loop), None)
        assert violations(found.config, code) == []
        return counts(code) | {"LDS": sum(i.name == "LDS" for i in code.hot)}

    for d_head in (64, 128):
        # For each score one product and sum more; for each distance of the thread's a load.
        evenly = loop_of(kernel(d_head, "evenly"))
        assert evenly["FFMA"] <= 2 * evenly["MUFU"] + 4
        assert evenly["total"] <= 7.5 * evenly["MUFU"]
        otherwise = loop_of(kernel(d_head, "otherwise"))
        assert otherwise["FFMA"] == otherwise["MUFU"]
        assert otherwise["LDS"] == otherwise["MUFU"] // 2 + 2
        assert otherwise["total"] <= 8.5 * otherwise["MUFU"]
