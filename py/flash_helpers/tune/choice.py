"""The library's own choice of a kernel, for a problem as the tools state it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flash_helpers.configs.device_facts import DeviceFacts
from flash_helpers.problem import Problem
from flash_helpers.tune.lookup import TuningResults

if TYPE_CHECKING:
    from flash_attention.problem import AttentionProblem
    from flash_attention.select import Choice


def choose(problem: Problem, facts: DeviceFacts, results: TuningResults | None = None) -> Choice:
    """What ``attention`` would run for a problem on a device, which need not be there.

    Args:
        problem: the sizes.
        facts: the device.
        results: tuning results; None: choose by the model alone.

    Raises:
        flash_attention.errors.NoKernelError: no kernel computes it.
    """
    from flash_attention.select import select

    return select(attention_problem(problem), facts, results)


def attention_problem(problem: Problem) -> AttentionProblem:
    """The problem as ``select`` sees it."""
    from flash_attention.problem import AttentionProblem, visible_limits

    left, right = visible_limits(problem.causal, (None, None), problem.seq_len, problem.seq_len_k)
    return AttentionProblem(
        dtype=problem.dtype,
        batch=problem.batch,
        seq_len_q=problem.seq_len,
        seq_len_k=problem.seq_len_k,
        n_heads=problem.heads,
        n_heads_kv=problem.heads_kv,
        d_head=problem.d_head,
        d_head_v=problem.d_head,
        left=left,
        right=right,
    )
