"""What a tune says: while it runs, and of each bucket in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flash_helpers.problem import Problem
from flash_helpers.results.bucket import Bucket
from flash_helpers.results.measurement import Measurement
from flash_helpers.tune.compile import OnKernel
from flash_helpers.tune.space import Pruned


@dataclass
class TunedProblem:
    """The outcome of one bucket.

    Attributes:
        bucket: the bucket.
        problem: the sizes measured.
        pruned: kernels that the resource model left out.
        results: everything known of the bucket, the fastest first.
        state: ``tuned``, ``known`` (all was in the database), ``partly`` (interrupted, or kernels are not
            compiled yet) or ``skipped`` (nothing is known).
        reason: why it is ``partly`` tuned or ``skipped``.
    """

    bucket: Bucket
    problem: Problem
    pruned: list[Pruned] = field(default_factory=list)
    results: list[Measurement] = field(default_factory=list)
    state: str = "skipped"
    reason: str = "the budget was spent before"

    @property
    def best(self) -> Measurement | None:
        """The fastest kernel, if any was timed."""
        return next((m for m in self.results if m.milliseconds is not None), None)


@dataclass
class Watcher:
    """Whom a tune tells what it does.

    Attributes:
        on_kernel: called with (compiled kernel, done, all).
        on_begin: called before each pass over a bucket with (bucket, candidates).
        on_measured: called with (bucket, measurement) after it was written.
        on_screened: called with the outcome so far after the first pass over a bucket.
        on_end: called with the outcome of a bucket.
    """

    on_kernel: OnKernel | None = None
    on_begin: Callable[[Bucket, int], None] = lambda bucket, candidates: None
    on_measured: Callable[[Bucket, Measurement], None] = lambda bucket, measured: None
    on_screened: Callable[[TunedProblem], None] = lambda tuned: None
    on_end: Callable[[TunedProblem], None] = lambda tuned: None
