"""What the Hopper family's table of backward choices says of one problem on one device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from flash_helpers.kernels.defaults import Defaults, gathering_reason, size_for
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.hopper.backward.choices import CHOICES, choose_hopper_backward_kernel
from flash_helpers.kernels.hopper.backward.config import HopperBackwardKernelConfig
from flash_helpers.kernels.hopper.family import HOPPER
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.kernels.traits import BackwardTraits

PLACE = 0  # the Ampere family comes behind
DETERMINISTIC = "equal bits are wanted: "
SECTIONS = "a function of the user's hides keys, so that items differ in length: heads in sections"
SUM_BYTES = 4
SHARE_OF_L2 = 0.75


def defaults(problem: AttentionProblem, facts: DeviceFacts) -> Defaults | None:
    """The defaults for a problem; None where the device or the head size has no kernel."""
    found = size_for(problem, sizes()) if HOPPER.runs_on(facts.target) else None
    if found is None:
        return None
    kernel, reason = choose_hopper_backward_kernel(
        problem.dtype,
        found,
        problem.seq_len_q,
        BackwardTraits(**problem.features()),
        problem.deterministic,
        head_fill(problem, found[0], facts),
    )
    config = kernel.config
    assert isinstance(config, HopperBackwardKernelConfig)
    if hides_keys(problem) and not config.head_sections:
        config, reason = replace(config, head_sections=True), f"{reason}; {SECTIONS}"
    begin = gathering_reason(problem) + (DETERMINISTIC if problem.deterministic else "")
    chosen = (config, begin + reason)
    return Defaults(chosen, chosen, PLACE)


def head_fill(problem: AttentionProblem, d_head: int, facts: DeviceFacts) -> float:
    """How much of the SMs' rounds is filled by thread blocks that take a head each, with its sums of dQ.

    0 where packed sequences may differ in length, where a mod hides keys, of which such blocks skip none, and
    where the sums do not stay in the L2 cache beside what passes through it.
    """
    if hides_keys(problem):
        return 0.0
    heads = problem.batch * problem.n_heads_kv
    if problem.varlen or not heads or not facts.sm_count:
        return 0.0
    group = problem.n_heads // problem.n_heads_kv
    sums = min(heads, facts.sm_count) * group * problem.seq_len_q * d_head * SUM_BYTES
    if sums > SHARE_OF_L2 * facts.l2_bytes:
        return 0.0
    rounds = -(-heads // facts.sm_count)
    return heads / (rounds * facts.sm_count)


def hides_keys(problem: AttentionProblem) -> bool:
    """Whether a function of the user's is a mask."""
    return problem.mod is not None and problem.mod.result("visible") is not None


@cache
def sizes() -> tuple[tuple[int, int], ...]:
    """(d_head, d_head_v) of all choices."""
    return tuple({(choice.d_head, choice.d_head_v) for choice in CHOICES})
