"""What ``explain`` says of registers, spills and occupancy, against the driver and the profiler."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys

import pytest

from flash_attention.backends.cuda import device_facts_of, get_kernel
from flash_helpers.build import build_library
from flash_helpers.explain import explain
from flash_helpers.explain.counters import SECONDS, ProfilerError, measure
from flash_helpers.explain.explanation import Compiled, compile_facts
from flash_helpers.kernel_configs import (
    ForwardKernel,
    get_hopper_kernels_to_build,
    get_kernel_progression_configs,
)
from flash_helpers.kernels.ampere.forward.choices import get_ampere_best_kernels
from flash_helpers.kernels.families import family_of
from flash_helpers.problem import Problem

KERNELS = [
    *map(ForwardKernel, get_kernel_progression_configs()),
    *get_ampere_best_kernels(),
    *get_hopper_kernels_to_build(),
]
PROFILED = KERNELS[6]  # the last step of the ladder
LIMITS = ("registers", "shared_mem", "warps", "blocks")
PROGRAM = """
import sys, torch
from flash_attention import forward
from flash_helpers.kernel_configs import parse_kernel_name_into_config
config = parse_kernel_name_into_config(sys.argv[1])
q = torch.zeros(1, 256, 1, config.d_head, dtype=config.dtype.to_torch_dtype(), device="cuda")
forward(config, q, q, q)
torch.cuda.synchronize()
"""


def problem_of(kernel: ForwardKernel) -> Problem:
    """A problem that the kernel computes."""
    return Problem(kernel.config.dtype, 1, 16, 4096, kernel.config.d_head, kernel.traits.causal)


@pytest.mark.parametrize("kernel", KERNELS, ids=ForwardKernel.short_form)
def test_they_are_the_drivers(kernel: ForwardKernel) -> None:
    facts = device_facts_of()
    if reason := kernel.config.infeasible_reason(facts):
        pytest.skip(reason)
    (built,) = build_library([kernel], facts.target, jobs=1).kernels
    compiled = Compiled(built.registers, built.spill_bytes)
    loaded = get_kernel(kernel).attributes()
    assert compiled.registers == loaded["registers"]
    if compiled.spill_bytes:
        assert loaded["local_bytes"] > 0
    found = explain(kernel.config, problem_of(kernel), facts, compiled)
    assert found.performance is not None
    assert found.performance.occupancy.blocks == loaded["blocks_per_sm"]
    assert loaded["max_threads_per_block"] >= 32 * kernel.config.n_warps
    if family_of(kernel).name == "hopper":  # its registers at launch follow from the block's threads
        assert explain(kernel.config, problem_of(kernel), facts).registers.total == loaded["registers"]


def test_they_are_the_profilers() -> None:
    ncu = shutil.which("ncu")
    if ncu is None:
        pytest.skip("ncu is not on PATH")
    facts = device_facts_of()
    metrics = ["launch__registers_per_thread", *(f"launch__occupancy_limit_{name}" for name in LIMITS)]
    done = subprocess.run(
        [ncu, "--csv", "--kernel-name", "regex:flash_forward_kernel", "--metrics", ",".join(metrics),
         sys.executable, "-c", PROGRAM, PROFILED.config.short_form()],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        pytest.skip("this user may not profile here")
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.index('"ID"') :]
    values = {row["Metric Name"]: float(row["Metric Value"]) for row in csv.DictReader(io.StringIO(table))}
    found = explain(PROFILED.config, problem_of(PROFILED), facts, compile_facts(PROFILED, facts.target))
    assert found.compiled is not None
    assert found.compiled.registers == values["launch__registers_per_thread"]
    assert found.performance is not None
    assert found.performance.occupancy.blocks == min(values[name] for name in metrics[1:])


def test_counters_stand_beside_the_prediction() -> None:
    """``explain --ncu``: one launch, and what it is expected to take."""
    if shutil.which("ncu") is None:
        pytest.skip("ncu is not on PATH")
    facts = device_facts_of()
    found = explain(PROFILED.config, problem_of(PROFILED), facts)
    try:
        counters = measure(found)
    except ProfilerError as error:
        if "ERR_NVGPUCTRPERM" in str(error):
            pytest.skip("this user may not profile here")
        raise
    assert found.performance is not None
    assert {"time", "registers", "DRAM bytes", "exp2", "issue"} <= set(counters)
    seconds = counters["time"].value * SECONDS[counters["time"].unit]
    assert seconds * 1e3 == pytest.approx(found.performance.expected, rel=0.7)
    assert counters["DRAM bytes"].value > 0
