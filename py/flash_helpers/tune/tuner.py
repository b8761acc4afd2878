"""Tuning: prune, compile, verify, time, remember. Each step's result survives an interruption.

Buckets are measured in two passes: all of them a little, so that each has a winner early, then each to its
end. A budget that is too small leaves rough results everywhere rather than good ones in half of the buckets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from typing import Protocol

import torch

from flash_helpers import generation
from flash_helpers.benchmark.gradients import implementation_of
from flash_helpers.benchmark.implementations import Implementation
from flash_helpers.benchmark.timers import timer_for
from flash_helpers.benchmark.timing import Timer
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.kernel import Kernel, KernelConfig
from flash_helpers.problem import Problem
from flash_helpers.results.database import TuningDatabase
from flash_helpers.results.device import TunedDevice
from flash_helpers.select.choice import chosen_kernels
from flash_helpers.tune.compile import OnKernel, compile_candidates
from flash_helpers.tune.halving import Plan
from flash_helpers.tune.outcome import TunedProblem, Watcher
from flash_helpers.tune.session import Session
from flash_helpers.tune.space import tuning_space

COMPILE_SHARE = 0.6  # of the budget: what is not compiled by then is left for the next time


class Compile(Protocol):
    """Makes kernels ready to be called: see ``compile_candidates``."""

    def __call__(
        self,
        kernels: Iterable[Kernel],
        target: int,
        jobs: int | None = None,
        on_kernel: OnKernel | None = None,
        out_of_time: Callable[[], bool] = ...,
    ) -> tuple[set[Kernel], dict[Kernel, str]]: ...


def tune(
    problems: Iterable[Problem],
    *,
    device: torch.device,
    facts: DeviceFacts | None = None,
    configs: Sequence[KernelConfig] | None = None,
    chosen: Callable[[Problem, DeviceFacts], list[Kernel]] = chosen_kernels,
    database: TuningDatabase | None = None,
    budget: float | None = None,
    plan: Plan | None = None,
    jobs: int | None = None,
    fresh: bool = False,
    timer: Timer | None = None,
    implement: Callable[[Kernel], Implementation] = implementation_of,
    compile_kernels: Compile = compile_candidates,
    driver: str | None = None,
    watcher: Watcher | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[TunedProblem]:
    """Finds the fastest configuration of each problem's bucket; what is known is not measured again.

    Args:
        problems: the most important first; the first one of each bucket is measured.
        device: where to measure.
        facts: of the device; ``None``: asked from it.
        configs: candidates; ``None``: the tuning space.
        chosen: kernels measured besides, since selection takes them where nothing was tuned.
        database: ``None``: the user's.
        budget: seconds for everything. Buckets that it does not reach are ``skipped``; 0: nothing
            is measured.
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

    def out_of(seconds: float | None) -> Callable[[], bool]:
        return lambda: seconds is not None and clock() - start >= seconds

    if facts is None:
        from flash_attention.backends.cuda import device_facts_of

        facts = device_facts_of(device)
    session = Session(
        device,
        facts,
        TunedDevice.of(facts, driver),
        database or TuningDatabase(),
        plan or Plan(),
        timer or timer_for(device),
        implement,
        watcher or Watcher(),
        out_of(budget),
    )
    try:
        work = session.plan_work(problems, tuning_space() if configs is None else configs, chosen, fresh)
        unknown = {tuned.bucket: session.unknown(tuned.bucket, kernels) for tuned, kernels in work}
        for tuned, _ in work:
            tuned.problem.check_memory(device, outputs=len(unknown[tuned.bucket]))
        if not session.out_of_time():
            in_turn = chain.from_iterable(
                zip_longest(*unknown.values())
            )  # no bucket goes without, come what may
            session.ready, session.refused = compile_kernels(
                dict.fromkeys(kernel for kernel in in_turn if kernel is not None),
                facts.target,
                jobs,
                session.watcher.on_kernel,
                out_of(None if budget is None else COMPILE_SHARE * budget),
            )
        for tuned, kernels in work:
            session.screen(tuned, kernels)
        for tuned, kernels in work:
            session.finish(tuned, kernels)
    finally:
        generation.begin()  # choices of this process are made anew, by what was measured
    return [tuned for tuned, _ in work]
