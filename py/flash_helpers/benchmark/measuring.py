"""The measuring loop: each output is compared with a reference first; what is wrong is not timed.

Nobody's output is the standard, this library's least of all: a kernel that is wrong and quick must not set
the time that others are measured by. The reference is ``correctness.reference``, plain PyTorch operations in
float32, and the rule that of ``OutputError.wrong_reason``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from flash_helpers.benchmark.correctness import OutputError, output_error
from flash_helpers.benchmark.implementations import Prepared, UnavailableError
from flash_helpers.benchmark.plan import MODES, Plan
from flash_helpers.benchmark.timing import TimedCall, Timer, Timing, alternate, significant
from flash_helpers.kernels.dtype import DType

Expected = Tensor | tuple[Tensor, ...]


@dataclass
class Measured:
    """What became of one contestant.

    Attributes:
        status: ``ok``, ``wrong`` (not timed), ``failed`` (raised) or ``unavailable``.
        reason: why it is not ``ok``, or why a timing is missing.
        error: relative error against the reference.
        kernel: short form of the kernel that ran, of a contestant that chooses one.
        timings: by mode.
    """

    status: str = "ok"
    reason: str = ""
    error: float | None = None
    kernel: str = ""
    timings: dict[str, Timing] = field(default_factory=dict)


class DeviceLostError(RuntimeError):
    """The CUDA context is broken by an earlier kernel; nothing can be measured in this process.

    Attributes:
        measured: what was found out before, by name.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.measured: dict[str, Measured] = {}


def measure_checked(
    contestants: Mapping[str, Callable[[], Prepared]],
    expected: Callable[[], Expected | Mapping[str, Expected]],
    dtype: DType,
    device: torch.device,
    timer: Timer,
    plan: Plan,
    label: str,
) -> dict[str, Measured]:
    """Checks all, then times the right ones together.

    Args:
        contestants: by name; each binds its inputs when called, and raises where it can't.
        expected: makes the reference, float32, the output or several tensors, of contestants that compute
            different things one by name; it is dropped before anything is timed.
        dtype: element type of the outputs, which decides the tolerance.
        device: where they run.
        timer: measures one call.
        plan: how to measure.
        label: names the problem in messages.

    Raises:
        DeviceLostError: a kernel broke the CUDA context.
    """
    found: dict[str, Measured] = {}
    calls: dict[str, TimedCall] = {}
    ref = expected()
    try:
        for name, prepare in contestants.items():
            one = found[name] = Measured()
            try:
                prepared = prepare()
                timed = TimedCall(prepared.call, prepared.context)
                error = compared(timed, ref[name] if isinstance(ref, Mapping) else ref, dtype)
                one.error, one.kernel = significant(error.relative), prepared.ran()
                if wrong := error.wrong_reason(dtype):
                    one.status, one.reason = "wrong", wrong
                else:
                    timer.estimate(timed)
                    calls[name] = timed
            except UnavailableError as absent:
                one.status, one.reason = "unavailable", str(absent)
            except Exception as raised:
                one.status, one.reason = "failed", failure_text(raised, device, f"{name} on {label}")
        del ref
        _time_together(found, calls, device, timer, plan, label)
    except DeviceLostError as lost:
        lost.measured = found
        raise
    return found


def compared(timed: TimedCall, expected: Expected, dtype: DType) -> OutputError:
    """The error of what one call gives, the largest if it is several tensors.

    Args:
        timed: gives what is expected; of one tensor, that or a tuple that begins with it.
        expected: the reference, of the same shape.
        dtype: element type of what the call gives.

    Raises:
        ValueError: another shape, or another number of tensors.
    """
    several = expected if isinstance(expected, tuple) else (expected,)
    # Memory that comes back from here holds no right result of somebody else: who writes nothing is noticed.
    for tensor in several:
        torch.full(tensor.shape, float("nan"), dtype=dtype.to_torch_dtype(), device=tensor.device)
    with timed.context():
        given = timed.call()
    if not isinstance(expected, tuple):
        return output_error(given[0] if isinstance(given, tuple) else given, expected)
    errors = [output_error(one, right) for one, right in zip(given, several, strict=True)]
    return OutputError(max(e.relative for e in errors), max(e.worst_row for e in errors))


def failure_text(error: Exception, device: torch.device, name: str) -> str:
    """What an exception says, in one line.

    Args:
        error: the exception.
        device: asked whether it still works.
        name: whose exception it is.

    Raises:
        DeviceLostError: the CUDA context does not work any more.
    """
    first_line = (str(error).strip().splitlines() or [""])[0]
    text = f"{type(error).__name__}: {first_line}"[:300]
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception as lost:
            raise DeviceLostError(f"{name}: {text}") from lost
    return text


def _is_over(end: float) -> bool:
    return time.monotonic() > end


def _time_together(
    found: dict[str, Measured],
    calls: dict[str, TimedCall],
    device: torch.device,
    timer: Timer,
    plan: Plan,
    label: str,
) -> None:
    """Adds the timings of each mode to ``found``."""
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
            deadline=None if plan.seconds is None else partial(_is_over, time.monotonic() + plan.seconds),
        )
        for name, values in samples.items():
            found[name].timings[mode] = Timing.of(values, calls[name].launch_hidden)
        for name, raised in failures.items():
            found[name].reason = f"{mode}: {failure_text(raised, device, f'{name} on {label}')}"
            # A peer that can't be captured in a graph keeps its other times.
            found[name].status = "ok" if found[name].timings else "failed"
