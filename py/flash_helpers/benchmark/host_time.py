"""How long Python is busy with one call: the cost that small problems are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flash_helpers.benchmark.implementations import Implementation
from flash_helpers.benchmark.plan import Plan
from flash_helpers.benchmark.runner import measure_problem
from flash_helpers.benchmark.timers import timer_for
from flash_helpers.benchmark.timing import Timer, Timing
from flash_helpers.kernels.dtype import DType
from flash_helpers.problem import Problem

SMALL = Problem(DType.FP16, batch=1, heads=8, seq_len=128, d_head=128)


def host_times(
    implementations: Sequence[Implementation],
    device: torch.device,
    problem: Problem = SMALL,
    rounds: int = 31,
    timer: Timer | None = None,
) -> dict[str, Timing | str]:
    """Host time of one eager call, milliseconds, by implementation name; a text where it was not timed.

    The GPU's work is so small that it is never waited for. On the CPU the time is that of the whole call.

    Raises:
        DeviceLostError: a kernel broke the CUDA context.
    """
    timer = timer or timer_for(device)
    mode = "host" if "host" in timer.modes else "call"
    rows = measure_problem(problem, implementations, device, Plan(rounds, (mode,)), timer)
    return {row.implementation: row.timings.get(mode) or f"{row.status}: {row.reason}" for row in rows}
