"""The library's own choice of a kernel, for a problem as the tools state it."""

from __future__ import annotations

import itertools
from dataclasses import replace

from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.families import kernel_of
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import FORWARD, HEAD_SIZES, AttentionProblem, visible_limits
from flash_helpers.problem import Problem
from flash_helpers.select.candidates import head_sizes
from flash_helpers.select.family_choices import family_choices
from flash_helpers.select.select import Choice, TuningDatabase, select

BUCKET_ENDS = (0.75, 1.4)  # lengths, as parts of a power of two, that still belong to its bucket


def choose(problem: Problem, facts: DeviceFacts, results: TuningDatabase | None = None) -> Choice:
    """What ``attention`` would run for a problem on a device, which need not be there.

    Args:
        problem: the sizes.
        facts: the device.
        results: tuning results; None: choose without any.

    Raises:
        flash_helpers.select.errors.NoKernelError: no kernel computes it.
    """
    return select(attention_problem(problem), facts, results)


def check_head_size(d_head: int) -> None:
    """Refuses a head size that no tensor of ``attention`` has.

    Raises:
        ValueError: says which are allowed.
    """
    if d_head not in HEAD_SIZES:
        raise ValueError(
            f"d_head is {d_head}; attention takes the multiples of {HEAD_SIZES.step} from {HEAD_SIZES.start} "
            f"to {HEAD_SIZES[-1]}: give one of these"
        )


def attention_problem(problem: Problem, lse: bool = False, deterministic: bool = False) -> AttentionProblem:
    """The problem as ``select`` sees it.

    Args:
        problem: the sizes and the direction.
        lse: of a forward pass: the log-sum-exp is wanted too.
        deterministic: of a backward pass: its bits are the same in every run.
    """
    left, right = visible_limits(problem.causal, (None, None), problem.seq_len, problem.seq_len_k)
    wanted = AttentionProblem(
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
        lse=lse,
    )
    return wanted if problem.direction == FORWARD else wanted.backward(deterministic)


def chosen_kernels(problem: Problem, facts: DeviceFacts) -> list[Kernel]:
    """The kernels that each family's tables name for a bucket's problems, whatever was tuned.

    A tuned kernel takes the place of one of these, so that each is measured beside the others. The tables go
    by length, hence both ends of the bucket; and some kernels give no log-sum-exp, or gradients whose bits
    differ between runs.

    Args:
        problem: the bucket's.
        facts: the device.
    """
    kernels: dict[Kernel, None] = {}
    for scale, strict in itertools.product((1.0, *BUCKET_ENDS), (False, True)):
        queries, keys = (max(1, round(scale * n)) for n in (problem.seq_len, problem.seq_len_k))
        sizes = attention_problem(replace(problem, seq_len=queries, seq_len_k=keys), strict, strict)
        for choice in family_choices(sizes, facts):
            whole = choice.obstacle is None and choice.n_splits == 1
            if whole and head_sizes(choice.kernel.config) == (problem.d_head, problem.d_head):
                kernels[kernel_of(choice.kernel.config, causal=problem.causal)] = None
    return list(kernels)
