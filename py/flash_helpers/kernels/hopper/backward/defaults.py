"""What the Hopper family's table of backward choices says of one problem on one device."""

from __future__ import annotations

from functools import cache

from flash_helpers.kernels.defaults import Defaults, size_for
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.hopper.backward.choices import CHOICES, choose_hopper_backward_kernel
from flash_helpers.kernels.hopper.backward.config import CAPABILITY
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.kernels.traits import BackwardTraits

PLACE = 0  # the Ampere family comes behind
DETERMINISTIC = "equal bits are wanted: "


def defaults(problem: AttentionProblem, facts: DeviceFacts) -> Defaults | None:
    """The defaults for a problem; None where the device or the head size has no kernel."""
    found = size_for(problem, sizes()) if facts.capability == CAPABILITY else None
    if found is None:
        return None
    kernel, reason = choose_hopper_backward_kernel(
        problem.dtype, found, problem.seq_len_q, BackwardTraits(**problem.features()), problem.deterministic
    )
    chosen = (kernel.config, (DETERMINISTIC if problem.deterministic else "") + reason)
    return Defaults(chosen, chosen, PLACE)


@cache
def sizes() -> tuple[tuple[int, int], ...]:
    """(d_head, d_head_v) of all choices."""
    return tuple({(choice.d_head, choice.d_head_v) for choice in CHOICES})
