"""The two passes over the buckets of one tune: what is unknown is checked, timed and remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from itertools import groupby
from typing import Any

import torch

from flash_helpers.benchmark.environment import environment
from flash_helpers.benchmark.expected import expected_of
from flash_helpers.benchmark.implementations import Implementation
from flash_helpers.benchmark.measuring import DeviceLostError, compared, failure_text
from flash_helpers.benchmark.results import Row
from flash_helpers.benchmark.timing import TimedCall, Timer
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.kernel import Kernel, KernelConfig
from flash_helpers.problem import Problem
from flash_helpers.results.bucket import Bucket
from flash_helpers.results.database import TuningDatabase
from flash_helpers.results.device import TunedDevice, present_sources, sources_digest
from flash_helpers.results.measurement import FINAL, Measurement
from flash_helpers.tune.halving import Plan, StageResult, successive_halving
from flash_helpers.tune.outcome import TunedProblem, Watcher
from flash_helpers.tune.space import prune


@dataclass
class Session:
    """What the buckets of one tune share.

    Attributes:
        ready: the kernels that can be called.
        refused: those that the compiler refuses, with its first error line.
    """

    device: torch.device
    facts: DeviceFacts
    tuned_device: TunedDevice
    database: TuningDatabase
    plan: Plan
    timer: Timer
    implement: Callable[[Kernel], Implementation]
    watcher: Watcher
    out_of_time: Callable[[], bool]
    ready: set[Kernel] = field(default_factory=set)
    refused: dict[Kernel, str] = field(default_factory=dict)

    def plan_work(
        self,
        problems: Iterable[Problem],
        configs: Sequence[KernelConfig],
        chosen: Callable[[Problem, DeviceFacts], list[Kernel]],
        fresh: bool,
    ) -> list[tuple[TunedProblem, list[Kernel]]]:
        """Each bucket with its candidates: the chosen kernels first, then the most promising."""
        work: dict[Bucket, tuple[TunedProblem, list[Kernel]]] = {}
        for problem in problems:
            bucket = Bucket.of_problem(problem, self.facts.sm_count)
            if bucket in work:
                continue
            if fresh:
                self.database.forget(self.tuned_device, bucket)
            kernels, pruned = prune(configs, problem, self.facts)
            candidates = list(dict.fromkeys([*chosen(problem, self.facts), *kernels]))
            work[bucket] = (TunedProblem(bucket, problem, pruned), candidates)
        return list(work.values())

    def unknown(self, bucket: Bucket, kernels: Iterable[Kernel]) -> list[Kernel]:
        """The kernels to measure in a bucket: none where all is known.

        What is measured anew must be compared with the best so far, at the same time.
        """
        known = self._known(bucket)
        done = {m.kernel for m in known if m.done}
        unknown = [kernel for kernel in kernels if kernel.short_form() not in done]
        if unknown:
            finalists = [m.kernel for m in known if m.stage == FINAL and m.status == "ok"]
            again = finalists[: self.plan.finalists]
            unknown += [kernel for kernel in kernels if kernel.short_form() in again]
        return unknown

    def screen(self, tuned: TunedProblem, candidates: list[Kernel]) -> None:
        """First pass: checks what was never measured in the bucket and times it a little."""
        kernels = self.unknown(tuned.bucket, candidates)
        if not kernels:
            tuned.state, tuned.reason = "known", ""
        timed = {m.kernel for m in self._known(tuned.bucket) if m.milliseconds}
        here = self.ready | self.refused.keys()
        if any(kernel in here and kernel.short_form() not in timed for kernel in kernels):
            self._measure_present(tuned, kernels, self.plan, only_first_stage=True)
        self.watcher.on_screened(self._outcome(tuned))

    def finish(self, tuned: TunedProblem, candidates: list[Kernel]) -> None:
        """Second pass: measures the better ones until the best are ranked."""
        kernels = self.unknown(tuned.bucket, candidates)
        if kernels:
            plan = replace(self.plan, first_rounds=2 * self.plan.first_rounds)
            complete = self._measure_present(tuned, kernels, plan)
            missing = [k for k in kernels if k not in self.ready and k not in self.refused]
            if not complete:
                tuned.state, tuned.reason = "skipped", "the budget is spent"
            elif missing:
                tuned.state, tuned.reason = "partly", f"{len(missing)} kernels were not compiled in time"
            else:
                tuned.state, tuned.reason = "tuned", ""
        elif tuned.state != "known":  # so few that the first pass ranked them
            tuned.state, tuned.reason = "tuned", ""
        self.watcher.on_end(self._outcome(tuned))

    def _outcome(self, tuned: TunedProblem) -> TunedProblem:
        tuned.results = self._known(tuned.bucket)
        if tuned.state == "skipped" and tuned.best:
            tuned.state = "partly"
        return tuned

    def _measure_present(
        self, tuned: TunedProblem, kernels: list[Kernel], plan: Plan, only_first_stage: bool = False
    ) -> bool:
        """Measures what is compiled, and remembers what does not compile; False: out of time."""
        self.watcher.on_begin(tuned.bucket, len(kernels))
        refused = [kernel for kernel in kernels if kernel in self.refused]
        failed = [
            Row(kernel.short_form(), "kernel", tuned.problem, "failed", self.refused[kernel])
            for kernel in refused
        ]
        self._record(tuned, [(kernel, row, None) for kernel, row in zip(refused, failed, strict=True)])
        present = [kernel for kernel in kernels if kernel in self.ready]
        if self.out_of_time():
            return False
        return not present or self._measure(tuned, present, plan, only_first_stage)

    def _measure(
        self, tuned: TunedProblem, kernels: list[Kernel], plan: Plan, only_first_stage: bool
    ) -> bool:
        problem = tuned.problem
        q, k, v = problem.inputs(self.device, plan.seed)
        expected = expected_of(problem, q, k, v)
        by_name = {kernel.short_form(): kernel for kernel in kernels}
        rows: dict[str, Row] = {}
        calls: dict[str, TimedCall] = {}
        for name, kernel in by_name.items():
            if self.out_of_time():
                break
            row = Row(name, "kernel", problem)
            implementation = self.implement(kernel)
            try:
                if reason := implementation.unavailable_reason(problem, self.device):
                    raise NotImplementedError(reason)
                prepared = implementation.prepare(problem, q, k, v)
                timed = TimedCall(prepared.call, prepared.context)
                error = compared(timed, expected, problem.dtype)
                row = replace(row, error=error.relative)
                if wrong := error.wrong_reason(problem.dtype):
                    row = replace(row, status="wrong", reason=wrong)
                else:
                    self.timer.estimate(timed)
                    calls[name] = timed
            except Exception as raised:
                row = self._failure(tuned, kernel, row, raised)
            rows[name] = row
            if row.status != "ok":
                self._record(tuned, [(kernel, row, None)])
        del expected

        def on_stage(results: list[StageResult]) -> None:
            found = []
            for result in results:
                kernel, row = by_name[result.name], rows[result.name]
                if result.failure is not None:
                    row = self._failure(tuned, kernel, row, result.failure)
                found.append((kernel, row, result))
            self._record(tuned, found)

        measure = self.timer.measure("kernel")
        complete = successive_halving(calls, measure, plan, on_stage, self.out_of_time, only_first_stage)
        return complete and len(rows) == len(by_name)

    def _failure(self, tuned: TunedProblem, kernel: Kernel, row: Row, error: Exception) -> Row:
        try:
            text = failure_text(error, self.device, f"{row.implementation} on {row.problem.label()}")
            return replace(row, status="failed", reason=text)
        except DeviceLostError as lost:
            self._record(tuned, [(kernel, replace(row, status="failed", reason=str(lost)), None)])
            raise

    def _record(self, tuned: TunedProblem, found: Sequence[tuple[Kernel, Row, StageResult | None]]) -> None:
        measured = [
            (sources_digest(direction_of(kernel)), self._measurement(row, result))
            for kernel, row, result in found
        ]
        for sources, group in groupby(sorted(measured, key=lambda one: one[0]), lambda one: one[0]):
            self.database.record(self.tuned_device, sources, tuned.bucket, *(m for _, m in group))
        for _, measurement in measured:
            self.watcher.on_measured(tuned.bucket, measurement)

    def _measurement(self, row: Row, result: StageResult | None) -> Measurement:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        measured = Measurement(
            row.implementation, row.problem, row.status, row.reason, error=row.error,
            facts={**self._run_facts, "measured_at": now},
        )  # fmt: skip
        if result is None or result.timing is None:
            return measured
        timing = result.timing
        return replace(
            measured, stage=result.stage, milliseconds=timing.median, p20=timing.p20, p80=timing.p80,
            rounds=timing.rounds or 0,
        )  # fmt: skip

    def _known(self, bucket: Bucket) -> list[Measurement]:
        return self.database.measurements(self.tuned_device, present_sources(), bucket)

    @cached_property
    def _run_facts(self) -> dict[str, Any]:
        """What holds for the whole run; asking the driver takes a tenth of a second."""
        known = environment(self.device)
        return {name: known.get(name) for name in ("torch", "cuda", "git_commit")}
