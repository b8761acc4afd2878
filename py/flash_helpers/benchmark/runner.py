"""Runs implementations on problems: checks each output first, then times the right ones together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from flash_helpers.benchmark.build_ahead import build_for
from flash_helpers.benchmark.environment import environment, gpu_state
from flash_helpers.benchmark.expected import expected_of
from flash_helpers.benchmark.gradients import implementation_of, in_direction
from flash_helpers.benchmark.implementations import (
    Implementation,
    Prepared,
    UnavailableError,
)
from flash_helpers.benchmark.matrix_rate import matrix_tflops
from flash_helpers.benchmark.measuring import DeviceLostError, Measured, measure_checked
from flash_helpers.benchmark.plan import MODES, Plan
from flash_helpers.benchmark.results import Results, Row
from flash_helpers.benchmark.timers import timer_for
from flash_helpers.benchmark.timing import Timer
from flash_helpers.kernels.families import kernel_of
from flash_helpers.kernels.kernel import KernelConfig
from flash_helpers.problem import Problem


def bench(
    problems: Iterable[Problem],
    configs: Sequence[KernelConfig] = (),
    implementations: Sequence[Implementation] = (),
    *,
    fallback: Implementation | None = None,
    device: torch.device | str | None = None,
    plan: Plan | None = None,
    timer: Timer | None = None,
    on_row: Callable[[Row], None] | None = None,
    results: Results | None = None,
) -> Results:
    """Measures configurations and other implementations on each problem.

    Args:
        problems: the sizes.
        configs: kernel configurations; each runs the problems of its dtype and head size.
        implementations: peers, or ``AttentionImplementation()``.
        fallback: measured, besides those, on problems that none of ``configs`` fits.
        device: default: the current CUDA device if there is one, else the CPU.
        plan: how to measure.
        timer: measures one call; default: the timer of the device.
        on_row: called with each finished row.
        results: rows are added to it, so that an interruption keeps what is done.

    Returns:
        ``results``, or a new one.

    Raises:
        ValueError: there is nothing to measure, or the device has none of the plan's timings.
        NotEnoughMemoryError: a problem does not fit; all problems are checked before the first runs.
        DeviceLostError: a kernel broke the CUDA context; ``results`` holds the rows up to there.
    """
    device = default_device() if device is None else torch.device(device)
    plan, timer = plan or Plan(), timer or timer_for(device)
    results = Results() if results is None else results
    problems = list(problems)
    if not configs and not implementations:
        raise ValueError("there is nothing to measure: no kernel and no peer is given; name one")
    if not any(MODES[mode][0] in timer.modes for mode in plan.modes):
        known = ", ".join(name for name, (mode, _) in MODES.items() if mode in timer.modes)
        raise ValueError(f"none of the timings {', '.join(plan.modes)} is known on {device}; known: {known}")

    def everyone_on(problem: Problem) -> list[Implementation]:
        kernels = [implementation_of(kernel_of(c, causal=problem.causal)) for c in configs if problem.fits(c)]
        stand_in = [fallback] if fallback is not None and not kernels else []
        others = [*implementations, *(one for one in stand_in if one not in implementations)]
        return [*(in_direction(one, problem.direction) for one in others), *kernels]

    for problem in problems:
        problem.check_memory(device, outputs=len(everyone_on(problem)))
    facts = environment(device)
    # A processor's rate of a matrix product is no ceiling: it depends on size and type in ways of its own.
    for dtype in sorted({p.dtype for p in problems}) if device.type == "cuda" else ():
        if dtype.name not in results.matrix_tflops:
            results.matrix_tflops[dtype.name] = matrix_tflops(dtype, device, timer)

    def keep(rows: Iterable[Row]) -> None:
        for row in rows:
            results.rows.append(replace(row, environment=facts))
            if on_row is not None:
                on_row(results.rows[-1])

    build_for([(problem, everyone_on(problem)) for problem in problems], device)
    for problem in problems:
        everyone = everyone_on(problem)
        try:
            keep(measure_problem(problem, everyone, device, plan, timer))
        except DeviceLostError as lost:
            keep(row for row in _rows(problem, everyone, lost.measured) if row.timings)
            raise
    return results


def measure_problem(
    problem: Problem,
    implementations: Sequence[Implementation],
    device: torch.device,
    plan: Plan,
    timer: Timer,
) -> list[Row]:
    """One row for each implementation, in their order, without the run's environment.

    Args:
        implementations: of several with one name, the last counts.

    Raises:
        DeviceLostError: a kernel broke the CUDA context.
    """
    q, k, v = problem.inputs(device, plan.seed)

    def prepared(implementation: Implementation) -> Prepared:
        if reason := implementation.unavailable_reason(problem, device):
            raise UnavailableError(reason)
        return implementation.prepare(problem, q, k, v)

    measured = measure_checked(
        {i.name: partial(prepared, i) for i in implementations},
        lambda: expected_of(problem, q, k, v),
        problem.dtype,
        device,
        timer,
        plan,
        problem.label(),
    )
    state = gpu_state(device)
    return [replace(row, gpu_state=state) for row in _rows(problem, implementations, measured)]


def _rows(
    problem: Problem, implementations: Sequence[Implementation], measured: Mapping[str, Measured]
) -> list[Row]:
    """Rows of those that were reached."""
    kinds = {implementation.name: implementation.kind for implementation in implementations}
    return [
        Row(name, kinds[name], problem, m.status, m.reason, m.error, m.timings, kernel=m.kernel)
        for name, m in measured.items()
    ]


def default_device() -> torch.device:
    """The current CUDA device if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def named_device(text: str | None) -> torch.device:
    """The device that ``--device`` names; None: ``default_device()``.

    Raises:
        ValueError: neither the CPU nor a GPU that is there.
    """
    if text is None:
        return default_device()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text.startswith("cuda") and not count:
        raise ValueError(
            f"device is {text!r}, and no CUDA device can be used here: flash-attention doctor says why"
        )
    valid = ["cpu", *(["cuda"] if count else []), *(f"cuda:{number}" for number in range(count))]
    if text not in valid:
        raise ValueError(f"device is {text!r}; here are: {', '.join(valid)}")
    return torch.device(text)
