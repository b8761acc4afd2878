"""Builds what cases need before anything is timed: a call that had to compile would run something else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from flash_helpers.benchmark.cases import DTYPE, GRADIENTS, Case
from flash_helpers.kernels.families import kernel_of
from flash_helpers.kernels.kernel import Kernel, KernelConfig
from flash_helpers.kernels.problem import FORWARD
from flash_helpers.problem import Problem


def build_ahead(
    cases: Sequence[Case],
    device: torch.device,
    further: Callable[[Kernel], Kernel] | None = None,
) -> float:
    """Builds the kernels that the library chooses for each case, in parallel.

    Args:
        cases: what will be measured.
        device: where; on the CPU there is nothing to build.
        further: gives one more kernel to build from the choice for the first case.

    Returns:
        Seconds that it took.
    """
    if device.type != "cuda":
        return 0.0
    from flash_attention import prepare
    from flash_attention.backends.cuda import device_facts_of
    from flash_helpers.build import build_kernels
    from flash_helpers.kernels.problem import AttentionProblem, visible_limits

    begin, problems = time.perf_counter(), []
    for case in cases:
        left, right = visible_limits(case.causal, case.limits, case.seq_q, case.seq_k)
        problem = AttentionProblem(
            DTYPE, case.batch, case.seq_q, case.seq_k, case.heads, case.heads_kv,
            case.d_head, case.d_head, left, right, varlen=bool(case.lengths),
            lse=case.feature == GRADIENTS,
        )  # fmt: skip
        problems += [problem, problem.backward()] if case.feature == GRADIENTS else [problem]
    chosen = prepare(problems, device)
    if further is not None:
        build_kernels([further(chosen[0].kernel)], [device_facts_of(device).target])
    return time.perf_counter() - begin


def build_ahead_of_grid(
    problems: Sequence[Problem], configs: Sequence[KernelConfig], device: torch.device, chooses: bool
) -> None:
    """Builds in parallel what a grid of problems runs of this library.

    What can't be built is left to the problem that needs it, whose row says why.

    Args:
        problems: what will be measured.
        configs: configurations that run the problems which they fit.
        device: where; on the CPU there is nothing to build.
        chooses: the library's own choice runs, too.
    """
    if device.type != "cuda":
        return
    from flash_attention import prepare
    from flash_attention.backends.cuda import device_facts_of
    from flash_attention.errors import BuildError, NoKernelError
    from flash_helpers.build import build_kernels
    from flash_helpers.select.choice import attention_problem

    facts = device_facts_of(device)
    named = {kernel_of(c, causal=problem.causal) for c in configs for problem in problems if problem.fits(c)}
    feasible = [kernel for kernel in named if kernel.infeasible_reason(facts) is None]
    # Gradients begin with a forward pass and its LSE.
    forward = [attention_problem(replace(p, direction=FORWARD), lse=p.direction != FORWARD) for p in problems]
    chosen = [attention_problem(problem) for problem in problems] if chooses else []
    with contextlib.suppress(BuildError, OSError):
        build_kernels(feasible, [facts.target])
    if chooses or any(problem.direction != FORWARD for problem in problems):
        with contextlib.suppress(BuildError, NoKernelError, OSError):
            prepare([*forward, *chosen], device)
