"""How long Python is busy with one call: the cost that small problems are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flash_helpers.benchmark.implementations import Implementation
from flash_helpers.benchmark.timing import TimedCall, Timer, Timing, alternate, timer_for
from flash_helpers.configs.dtype import DType
from flash_helpers.problem import Problem

SMALL = Problem(DType.FP16, batch=1, heads=8, seq_len=128, d_head=128)


def host_times(
    implementations: Sequence[Implementation],
    device: torch.device,
    problem: Problem = SMALL,
    rounds: int = 31,
    timer: Timer | None = None,
) -> dict[str, Timing | str]:
    """Host time of one eager call, by implementation name; a text where it could not be measured.

    The GPU's work is so small that it is never waited for. On the CPU the time is that of the whole call.
    """
    timer = timer or timer_for(device)
    mode = "host" if "host" in timer.modes else "call"
    q, k, v = problem.inputs(device)
    calls: dict[str, TimedCall] = {}
    found: dict[str, Timing | str] = {}
    for implementation in implementations:
        reason = implementation.unavailable_reason(problem, device)
        try:
            if reason is None:
                prepared = implementation.prepare(problem, q, k, v)
                timed = TimedCall(prepared.call, prepared.context)
                timer.estimate(timed)
                calls[implementation.name] = timed
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            found[implementation.name] = reason
    samples, failures = alternate(calls, timer.measure(mode), rounds)
    found.update({name: str(error) for name, error in failures.items()})
    found.update({name: Timing.of(values) for name, values in samples.items()})
    return found
