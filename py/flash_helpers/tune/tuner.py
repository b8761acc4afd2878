"""Tuning: prune, compile, verify, time, remember. Each step's result survives an interruption."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Protocol

import torch

from flash_helpers.benchmark.correctness import reference
from flash_helpers.benchmark.environment import environment
from flash_helpers.benchmark.implementations import Implementation, KernelImplementation
from flash_helpers.benchmark.results import Row
from flash_helpers.benchmark.runner import DeviceLostError, check_output, failed_row
from flash_helpers.benchmark.timing import TimedCall, Timer, timer_for
from flash_helpers.build.families import family_of
from flash_helpers.configs.device_facts import DeviceFacts
from flash_helpers.configs.kernel import ForwardConfig, ForwardKernel
from flash_helpers.problem import Problem
from flash_helpers.tune.bucket import Bucket
from flash_helpers.tune.compile import OnKernel, compile_candidates
from flash_helpers.tune.database import FINAL, Measurement, TuningDatabase
from flash_helpers.tune.device import TunedDevice, present_sources, sources_digest
from flash_helpers.tune.halving import Plan, StageResult, successive_halving
from flash_helpers.tune.space import Pruned, prune, tuning_space

COMPILE_SHARE = 0.6  # of the budget: what is not compiled by then is left for the next time


class Compile(Protocol):
    """Makes kernels ready to be called: see ``compile_candidates``."""

    def __call__(
        self,
        kernels: Iterable[ForwardKernel],
        target: int,
        jobs: int | None = None,
        on_kernel: OnKernel | None = None,
        out_of_time: Callable[[], bool] = ...,
    ) -> tuple[set[ForwardKernel], dict[ForwardKernel, str]]: ...


@dataclass
class TunedProblem:
    """The outcome of one bucket.

    Attributes:
        bucket: the bucket.
        problem: the sizes measured.
        pruned: kernels that the resource model left out.
        results: everything known of the bucket, the fastest first.
        state: ``tuned``, ``known`` (all was in the database), ``partly`` (interrupted, or kernels are not
            compiled yet) or ``skipped``.
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
        on_bucket: called before a bucket with (bucket, candidates), after it with the outcome.
        on_measured: called with (bucket, measurement) after it was written.
    """

    on_kernel: OnKernel | None = None
    on_begin: Callable[[Bucket, int], None] = lambda bucket, candidates: None
    on_measured: Callable[[Bucket, Measurement], None] = lambda bucket, measured: None
    on_end: Callable[[TunedProblem], None] = lambda tuned: None


def tune(
    problems: Iterable[Problem],
    *,
    device: torch.device,
    facts: DeviceFacts | None = None,
    configs: Sequence[ForwardConfig] | None = None,
    database: TuningDatabase | None = None,
    budget: float | None = None,
    plan: Plan | None = None,
    jobs: int | None = None,
    fresh: bool = False,
    timer: Timer | None = None,
    implement: Callable[[ForwardKernel], Implementation] = KernelImplementation,
    compile_kernels: Compile = compile_candidates,
    driver: str | None = None,
    watcher: Watcher | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[TunedProblem]:
    """Finds the fastest configuration of each problem's bucket; what is known is not measured again.

    Args:
        problems: one is measured for each bucket, the first; the most important first.
        device: where to measure.
        facts: of the device; ``None``: asked from it.
        configs: candidates; ``None``: the tuning space.
        database: ``None``: the user's.
        budget: seconds for everything. Buckets that it does not reach are ``skipped``.
        plan: how much is measured.
        jobs: compilations at the same time.
        fresh: forget what the database knows of these buckets.
        timer, implement, compile_kernels, driver, clock: in place of the device's own.
        watcher: told what happens.

    Returns:
        One outcome a bucket.

    Raises:
        flash_attention.errors.NoCudaDeviceError: ``facts`` not given and no GPU.
        NotEnoughMemoryError: a problem does not fit; nothing was measured.
        DeviceLostError: a kernel broke the CUDA context; it is remembered, and left out the next time.
        KeyboardInterrupt: what was measured is in the database.
    """
    start = clock()
    if facts is None:
        from flash_attention.backends.cuda import device_facts_of

        facts = device_facts_of(device)
    session = _Session(
        device,
        facts,
        TunedDevice.of(facts, driver),
        database or TuningDatabase(),
        plan or Plan(),
        timer or timer_for(device),
        implement,
        watcher or Watcher(),
        (lambda: False) if budget is None else lambda: clock() - start > budget,
    )
    work = session.plan_work(problems, configs, fresh)
    for tuned, kernels in work:
        tuned.problem.check_memory(device, outputs=len(kernels))
    wanted = list(dict.fromkeys(kernel for _, kernels in work for kernel in kernels))
    ready, refused = compile_kernels(
        wanted,
        facts.target,
        jobs,
        session.watcher.on_kernel,
        (lambda: False) if budget is None else lambda: clock() - start > COMPILE_SHARE * budget,
    )
    for tuned, kernels in work:
        session.tune_bucket(tuned, kernels, ready, refused)
    return [tuned for tuned, _ in work]


@dataclass(frozen=True)
class _Session:
    """What the buckets of one tune share."""

    device: torch.device
    facts: DeviceFacts
    tuned_device: TunedDevice
    database: TuningDatabase
    plan: Plan
    timer: Timer
    implement: Callable[[ForwardKernel], Implementation]
    watcher: Watcher
    out_of_time: Callable[[], bool]

    def plan_work(
        self, problems: Iterable[Problem], configs: Sequence[ForwardConfig] | None, fresh: bool
    ) -> list[tuple[TunedProblem, list[ForwardKernel]]]:
        """Each bucket with the kernels to measure in it: none where all is known."""
        configs = tuning_space() if configs is None else configs
        work: dict[Bucket, tuple[TunedProblem, list[ForwardKernel]]] = {}
        for problem in problems:
            bucket = Bucket.of_problem(problem, self.facts.sm_count)
            if bucket in work:
                continue
            if fresh:
                self.database.forget(self.tuned_device, bucket)
            kernels, pruned = prune(configs, problem, self.facts)
            known = self._known(bucket)
            done = {m.kernel for m in known if m.done}
            open_kernels = [kernel for kernel in kernels if kernel.short_form() not in done]
            if open_kernels:
                # What is measured anew must be compared with the best so far, at the same time.
                finalists = [m.kernel for m in known if m.stage == FINAL and m.status == "ok"]
                again = finalists[: self.plan.finalists]
                open_kernels += [kernel for kernel in kernels if kernel.short_form() in again]
            work[bucket] = (TunedProblem(bucket, problem, pruned), open_kernels)
        return list(work.values())

    def tune_bucket(
        self,
        tuned: TunedProblem,
        kernels: list[ForwardKernel],
        ready: set[ForwardKernel],
        refused: dict[ForwardKernel, str],
    ) -> None:
        """Measures one bucket and fills in its outcome."""
        self.watcher.on_begin(tuned.bucket, len(kernels))
        facts = self._facts()
        for kernel in kernels:
            if kernel in refused:
                row = Row(kernel.short_form(), "kernel", tuned.problem, "failed", refused[kernel])
                self._record(tuned, kernel, row, facts)
        missing = [kernel for kernel in kernels if kernel not in ready and kernel not in refused]
        present = [kernel for kernel in kernels if kernel in ready]
        if not kernels:
            tuned.state, tuned.reason = "known", ""
        elif present and not self.out_of_time():
            complete = self._measure(tuned, present, facts)
            tuned.state, tuned.reason = ("tuned", "") if complete else ("partly", "the budget is spent")
            if complete and missing:
                tuned.state, tuned.reason = "partly", f"{len(missing)} kernels were not compiled in time"
        tuned.results = self._known(tuned.bucket)
        self.watcher.on_end(tuned)

    def _measure(self, tuned: TunedProblem, kernels: list[ForwardKernel], facts: dict[str, Any]) -> bool:
        problem = tuned.problem
        q, k, v = problem.inputs(self.device, self.plan.seed)
        expected = reference(q, k, v, problem.causal)
        by_name = {kernel.short_form(): kernel for kernel in kernels}
        rows: dict[str, Row] = {}
        calls: dict[str, TimedCall] = {}
        for name, kernel in by_name.items():
            row = Row(name, "kernel", problem)
            implementation = self.implement(kernel)
            try:
                if reason := implementation.unavailable_reason(problem, self.device):
                    raise NotImplementedError(reason)
                prepared = implementation.prepare(problem, q, k, v)
                timed = TimedCall(prepared.call, prepared.context)
                row = check_output(row, timed, expected)
                if row.status == "ok":
                    self.timer.estimate(timed)
                    calls[name] = timed
            except Exception as error:
                row = self._failure(tuned, kernel, row, error, facts)
            rows[name] = row
            if row.status != "ok":
                self._record(tuned, kernel, row, facts)
        del expected

        def on_result(result: StageResult) -> None:
            kernel, row = by_name[result.name], rows[result.name]
            if result.failure is not None:
                row = self._failure(tuned, kernel, row, result.failure, facts)
            self._record(tuned, kernel, row, facts, result)

        measure = self.timer.measure("kernel")
        return successive_halving(calls, measure, self.plan, on_result, self.out_of_time)

    def _failure(
        self, tuned: TunedProblem, kernel: ForwardKernel, row: Row, error: Exception, facts: dict[str, Any]
    ) -> Row:
        try:
            return failed_row(row, error, self.device)
        except DeviceLostError as lost:
            self._record(tuned, kernel, replace(row, status="failed", reason=str(lost)), facts)
            raise

    def _record(
        self,
        tuned: TunedProblem,
        kernel: ForwardKernel,
        row: Row,
        facts: dict[str, Any],
        result: StageResult | None = None,
    ) -> None:
        measured = Measurement(
            row.implementation, tuned.problem, row.status, row.reason, error=row.error, facts=facts
        )
        if result is not None and result.timing is not None:
            timing = result.timing
            measured = replace(
                measured, stage=result.stage, milliseconds=timing.median, p20=timing.p20, p80=timing.p80,
                rounds=timing.rounds,
            )  # fmt: skip
        self.database.record(self.tuned_device, sources_digest(family_of(kernel)), tuned.bucket, measured)
        self.watcher.on_measured(tuned.bucket, measured)

    def _known(self, bucket: Bucket) -> list[Measurement]:
        return self.database.measurements(self.tuned_device, present_sources(), bucket)

    def _facts(self) -> dict[str, Any]:
        known = environment(self.device)
        facts = {name: known.get(name) for name in ("torch", "cuda", "git_commit")}
        return {**facts, "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds")}
