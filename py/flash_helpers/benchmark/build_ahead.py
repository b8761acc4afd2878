"""Builds what is to be measured before anything is timed, in parallel: nothing is compiled in between."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from flash_helpers.benchmark.cases import Case
from flash_helpers.benchmark.gradients import BackwardImplementation
from flash_helpers.benchmark.implementations import AttentionImplementation, Implementation
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import BACKWARD, FORWARD, AttentionProblem
from flash_helpers.problem import Problem
from flash_helpers.select.choice import attention_problem
from flash_helpers.select.errors import NoKernelError


def build_ahead(
    cases: Sequence[Case],
    device: torch.device,
    further: Callable[[Kernel], Kernel] | None = None,
    repeatable: bool = False,
) -> float:
    """Builds the kernels that the library chooses for each case, in parallel.

    Args:
        cases: what will be measured.
        device: where; on the CPU there is nothing to build.
        further: gives one more kernel to build from the choice for the first case.
        repeatable: those of gradients with equal bits in equal calls, too.

    Returns:
        Seconds that it took.
    """
    if device.type != "cuda":
        return 0.0
    from flash_attention import prepare
    from flash_attention.backends.cuda import device_facts_of
    from flash_helpers.build import build_kernels

    begin, problems = time.perf_counter(), []
    for case in cases:
        problem = case.problem()
        problems.append(problem)
        if case.direction != FORWARD:
            problems += [problem.backward(order) for order in ((False, True) if repeatable else (False,))]
    chosen = prepare(problems, device)
    if further is not None and (first := chosen[0].kernel) is not None:
        build_kernels([further(first)], [device_facts_of(device).target])
    return time.perf_counter() - begin


def build_for(work: Iterable[tuple[Problem, Sequence[Implementation]]], device: torch.device) -> list[Kernel]:
    """Builds, in parallel, what implementations run on problems; the kernels that were not there.

    What cannot be built is left to whoever measures it: the row says why.

    Args:
        work: each problem with those that are measured on it.
        device: where; on the CPU there is nothing to build.
    """
    if device.type != "cuda":
        return []
    from flash_attention.backends.cuda import build_obstacle, device_facts_of, load_kernel
    from flash_attention.errors import BuildError
    from flash_helpers.build import build_kernels

    facts, wanted = device_facts_of(device), dict[Kernel, None]()
    for problem, implementations in work:
        wanted.update(dict.fromkeys(_kernels(problem, implementations, facts, device)))
    missing = [kernel for kernel in wanted if load_kernel(kernel, facts.target) is None]
    if missing and build_obstacle() is None:
        with contextlib.suppress(BuildError, OSError):
            build_kernels(missing, [facts.target])
    return missing


def _kernels(
    problem: Problem, implementations: Sequence[Implementation], facts: DeviceFacts, device: torch.device
) -> Iterator[Kernel]:
    """Those that run a problem; of gradients also that of the forward pass, which gives output and LSE."""
    from flash_attention.run.cuda_choice import choice_for

    asked: list[AttentionProblem] = []
    for implementation in implementations:
        kernel: Kernel | None = getattr(implementation, "kernel", None)
        if isinstance(implementation, AttentionImplementation | BackwardImplementation):
            asked.append(attention_problem(problem))
        elif kernel is not None and implementation.unavailable_reason(problem, device) is None:
            yield kernel
    if problem.direction == BACKWARD:
        asked.append(attention_problem(replace(problem, direction=FORWARD), lse=True))
    for each in asked:
        with contextlib.suppress(NoKernelError):
            yield choice_for(each, facts, str(device), None, explained=False).kernel
