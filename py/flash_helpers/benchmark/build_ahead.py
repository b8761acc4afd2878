"""Builds what cases need before anything is timed: a call that had to compile would run something else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from flash_helpers.benchmark.cases import DTYPE, GRADIENTS, Case
from flash_helpers.kernels.kernel import Kernel


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
