"""The method of measuring, without a device: rounds in random order, repeats, pauses, medians.

A ``Timer`` measures one function once (``cuda_timer`` on a GPU, ``CpuTimer`` here, a fake one in
tests); ``alternate`` decides what is measured when. In each round every function is measured once,
in a new random order, so that a drift of the clock or of the temperature hits all of them alike.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from flash_helpers.content import ContentError, amount, typed

Measure = Callable[["TimedCall"], float]


@dataclass
class TimedCall:
    """A function under measurement.

    Attributes:
        call: does the work once; on a GPU it only enqueues it.
        context: entered around a whole measurement, not around each call: for settings that a
            user would make once.
        repeats: calls of one measurement; set by ``Timer.estimate``.
        host_seconds: host time of one call; set by ``Timer.estimate``.
        milliseconds: rough time of one call; set by ``Timer.estimate``.
        launch_hidden: False when a measurement could not hide the launch cost.
        state: what a timer keeps for this call, e.g. its CUDA graph.
    """

    call: Callable[[], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    repeats: int = 1
    host_seconds: float = 0.0
    milliseconds: float = 0.0
    launch_hidden: bool = True
    state: dict[str, Any] = field(default_factory=dict)


class Timer(Protocol):
    """Measures one call on one device. Times are milliseconds of a single call."""

    modes: tuple[str, ...]

    def estimate(self, timed: TimedCall) -> None:
        """Runs the call a few times and sets its ``repeats`` and rough times."""

    def measure(self, mode: str) -> Measure:
        """The function that measures in ``mode``, one of ``modes``."""


@dataclass(frozen=True)
class Timing:
    """The distribution of one quantity over the rounds, milliseconds a call.

    Attributes:
        median, p20, p80: quantiles over the rounds.
        rounds: number of measurements.
        launch_hidden: the launch cost was hidden in every one (kernel times only).

    All but the median are None where who measured did not keep them.
    """

    median: float
    p20: float | None = None
    p80: float | None = None
    rounds: int | None = None
    launch_hidden: bool = True

    @property
    def spread(self) -> tuple[str, str]:
        """p20 and p80 for tables; empty where they are not known."""
        p20, p80 = ("" if t is None else f"{t:.4f}" for t in (self.p20, self.p80))
        return p20, p80

    @classmethod
    def of(cls, samples: list[float], launch_hidden: bool = True) -> Timing:
        """Quantiles of ``samples``, which must not be empty."""
        p20, median, p80 = (significant(x) for x in np.percentile(samples, [20, 50, 80]))
        return cls(median, p20, p80, len(samples), launch_hidden)

    def to_json(self) -> dict[str, Any]:
        """Plain values; a hidden launch cost is the rule and not said."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {name: value for name, value in known.items() if name != "launch_hidden" or not value}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Timing:
        """The inverse of ``to_json``. Raises ContentError where the values are no times."""
        median = amount(typed(values, "median", (int, float)))
        if median == 0:
            raise ContentError("median is 0")
        p20, p80 = (amount(values[name]) if name in values else None for name in ("p20", "p80"))
        rounds = typed(values, "rounds", int) if "rounds" in values else None
        hidden = typed(values, "launch_hidden", bool) if "launch_hidden" in values else True
        return cls(median, p20, p80, rounds, hidden)


def significant(value: float) -> float:
    """Seven significant digits: more than any clock here tells."""
    return float(f"{value:.7g}")


def repeats_for(milliseconds: float, target_ms: float, most: int = 32) -> int:
    """Calls of one measurement, so that it takes about ``target_ms``: 1 to ``most``."""
    return max(1, min(most, int(target_ms / max(milliseconds, 1e-6))))


def alternate(
    calls: Mapping[str, TimedCall],
    measure: Measure,
    rounds: int,
    pause_seconds: float = 0.0,
    seed: int = 0,
    sleep: Callable[[float], None] = time.sleep,
    deadline: Callable[[], bool] | None = None,
) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """Measures every call once a round, in a new random order each round.

    Args:
        calls: name to call.
        measure: measures one call once, milliseconds.
        rounds: rounds.
        pause_seconds: idle time after each round: 0 keeps the device hot, 0.08 lets it cool.
        seed: of the orders.
        sleep: how to pause.
        deadline: asked after each round; True ends early with what there is.

    Returns:
        Samples by name, and for each call that raised, its exception; such a call is not
        measured again and its samples are dropped.
    """
    order = random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    failures: dict[str, Exception] = {}
    collect = gc.isenabled()
    gc.disable()  # a collection in the middle of a measurement is host time of nobody
    try:
        for _ in range(rounds):
            for name in order.sample(list(samples), len(samples)):
                try:
                    with calls[name].context():
                        samples[name].append(measure(calls[name]))
                except Exception as error:
                    failures[name] = error
                    del samples[name]
            if pause_seconds:
                sleep(pause_seconds)
            if deadline is not None and deadline():
                break
    finally:
        if collect:
            gc.enable()
    return samples, failures


class CpuTimer:
    """Wall time on the CPU. A call is done when it returns."""

    modes: tuple[str, ...] = ("kernel", "call")

    def __init__(self, target_ms: float = 20.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._target_ms = target_ms
        self._clock = clock

    def estimate(self, timed: TimedCall) -> None:
        """One call to warm up, one to time."""
        with timed.context():
            timed.call()
            timed.repeats = 1
            timed.milliseconds = self._wall(timed)
        timed.host_seconds = timed.milliseconds / 1e3
        timed.repeats = repeats_for(timed.milliseconds, self._target_ms)

    def measure(self, mode: str) -> Measure:
        """Kernel and call time are the same thing here."""
        if mode not in self.modes:
            raise ValueError(f"unknown timing mode {mode!r}; on the CPU: {', '.join(self.modes)}")
        return self._wall

    def _wall(self, timed: TimedCall) -> float:
        start = self._clock()
        for _ in range(timed.repeats):
            timed.call()
        return (self._clock() - start) * 1e3 / timed.repeats
