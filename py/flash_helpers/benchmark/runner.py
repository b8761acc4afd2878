"""Runs implementations on problems: checks each output first, then times the right ones together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_helpers.benchmark.correctness import output_error, reference
from flash_helpers.benchmark.environment import environment, gpu_state
from flash_helpers.benchmark.implementations import Implementation, KernelImplementation
from flash_helpers.benchmark.matrix_rate import matrix_tflops
from flash_helpers.benchmark.results import Results, Row
from flash_helpers.benchmark.timing import TimedCall, Timer, Timing, alternate, timer_for
from flash_helpers.problem import Problem

MODES: dict[str, tuple[str, bool]] = {
    "hot": ("kernel", False),
    "paused": ("kernel", True),
    "cold": ("cold", False),
    "graph": ("graph", False),
    "call": ("call", False),
    "host": ("host", False),
}
"""Name of a timing in a row: (mode of the timer, whether to pause between rounds)."""

DEFAULT_MODES = ("hot", "paused")


class DeviceLostError(RuntimeError):
    """The CUDA context is broken by an earlier kernel; nothing can be measured in this process.

    Attributes:
        rows: what was measured on the present problem before.
    """

    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        rounds: measurements of each implementation and mode.
        modes: names out of ``MODES``.
        pause_seconds: the pause of mode ``paused``.
        seed: of inputs and orders.
        check: compare outputs with the reference before timing.
    """

    rounds: int = 11
    modes: tuple[str, ...] = DEFAULT_MODES
    pause_seconds: float = 0.08
    seed: int = 0
    check: bool = True

    def __post_init__(self) -> None:
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown:
            raise ValueError(f"unknown timing {', '.join(map(repr, unknown))}; known: {', '.join(MODES)}")
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}; it must be at least 1")


def bench(
    problems: Iterable[Problem],
    configs: Sequence[object] = (),
    implementations: Sequence[Implementation] = (),
    *,
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
        device: default: the current CUDA device if there is one, else the CPU.
        plan: how to measure.
        timer: measures one call; default: the timer of the device.
        on_row: called with each finished row.
        results: rows are added to it, so that an interruption keeps what is done.

    Returns:
        ``results``, or a new one.

    Raises:
        NotEnoughMemoryError: a problem does not fit; all problems are checked before the first runs.
        DeviceLostError: a kernel broke the CUDA context; ``results`` holds the rows up to there.
    """
    device = default_device() if device is None else torch.device(device)
    plan, timer = plan or Plan(), timer or timer_for(device)
    results = Results() if results is None else results
    problems = list(problems)
    for problem in problems:
        fitting = sum(_fits(config, problem) for config in configs)
        problem.check_memory(device, outputs=fitting + len(implementations))
    facts = environment(device)
    for dtype in sorted({p.dtype for p in problems}):
        if dtype.name not in results.matrix_tflops:
            results.matrix_tflops[dtype.name] = matrix_tflops(dtype, device, timer)

    def keep(rows: Iterable[Row]) -> None:
        for row in rows:
            results.rows.append(replace(row, environment=facts))
            if on_row is not None:
                on_row(results.rows[-1])

    for problem in problems:
        kernels = [KernelImplementation.of(c, problem) for c in configs if _fits(c, problem)]
        try:
            keep(measure_problem(problem, [*implementations, *kernels], device, plan, timer))
        except DeviceLostError as lost:
            keep(lost.rows)
            raise
    return results


def measure_problem(
    problem: Problem,
    implementations: Sequence[Implementation],
    device: torch.device,
    plan: Plan,
    timer: Timer,
) -> list[Row]:
    """One row for each implementation, in their order, without the run's environment."""
    q, k, v = problem.inputs(device, plan.seed)
    ref = reference(q, k, v, problem.causal) if plan.check else None
    rows: dict[str, Row] = {}
    calls: dict[str, TimedCall] = {}
    for implementation in implementations:
        row = Row(implementation.name, implementation.kind, problem)
        unavailable = implementation.unavailable_reason(problem, device)
        if unavailable:
            rows[row.implementation] = replace(row, status="unavailable", reason=unavailable)
            continue
        try:
            prepared = implementation.prepare(problem, q, k, v)
            timed = TimedCall(prepared.call, prepared.context)
            row = check_output(row, timed, ref)
            if row.status == "ok":
                timer.estimate(timed)
                calls[row.implementation] = timed
        except Exception as error:
            row = failed_row(row, error, device)
        rows[row.implementation] = row
    del ref
    try:
        _time_together(rows, calls, device, plan, timer)
    except DeviceLostError as lost:
        lost.rows = tuple(row for row in rows.values() if row.timings)
        raise
    state = gpu_state(device)
    return [replace(row, gpu_state=state) for row in rows.values()]


def _time_together(
    rows: dict[str, Row], calls: dict[str, TimedCall], device: torch.device, plan: Plan, timer: Timer
) -> None:
    """Adds the timings of each mode to ``rows``."""
    for mode in plan.modes:
        timer_mode, pauses = MODES[mode]
        if timer_mode not in timer.modes or not calls:
            continue
        for timed in calls.values():
            timed.launch_hidden = True
        samples, failures = alternate(
            calls,
            timer.measure(timer_mode),
            plan.rounds,
            pause_seconds=plan.pause_seconds if pauses else 0.0,
            seed=plan.seed,
        )
        for name, raised in failures.items():
            # A peer that can't be captured in a graph keeps its other times.
            rows[name] = failed_row(rows[name], raised, device, f"{mode}: ", keep=bool(rows[name].timings))
        for name, values in samples.items():
            timing = Timing.of(values, calls[name].launch_hidden)
            rows[name] = replace(rows[name], timings={**rows[name].timings, mode: timing})


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


def _fits(config: object, problem: Problem) -> bool:
    return (getattr(config, "dtype", None), getattr(config, "d_head", None)) == (
        problem.dtype,
        problem.d_head,
    )


def check_output(row: Row, timed: TimedCall, ref: Tensor | None) -> Row:
    """``row`` with the error of one call against ``ref``, and status ``wrong`` where it is too large."""
    with timed.context():
        o = timed.call()
    if ref is None:
        return row
    error = output_error(o, ref)
    wrong = error.wrong_reason(row.problem.dtype)
    row = replace(row, error=error.relative)
    return replace(row, status="wrong", reason=wrong) if wrong else row


def failed_row(row: Row, error: Exception, device: torch.device, prefix: str = "", keep: bool = False) -> Row:
    """The row of an implementation that raised.

    Raises:
        DeviceLostError: the CUDA context does not work any more.
    """
    first_line = (str(error).strip().splitlines() or [""])[0]
    reason = f"{prefix}{type(error).__name__}: {first_line}"[:300]
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception as lost:
            raise DeviceLostError(f"{row.implementation} on {row.problem.label()}: {reason}") from lost
    return replace(row, status="ok" if keep else "failed", reason=reason)
