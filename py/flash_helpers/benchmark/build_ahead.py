"""Builds what cases need before anything is timed: a call that had to compile would run something else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from flash_helpers.benchmark.cases import Case
from flash_helpers.kernels.kernel import Kernel


def build_ahead(
    cases: Sequence[Case],
    device: torch.device,
    further: Callable[[Kernel], Kernel] | None = None,
) -> float:
    """Builds the kernel that the library chooses for each case, in parallel.

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

    begin = time.perf_counter()
    problems = [case.problem() for case in cases]
    chosen = prepare(problems, device)
    if further is not None:
        build_kernels([further(chosen[0].kernel)], [device_facts_of(device).target])
    return time.perf_counter() - begin
