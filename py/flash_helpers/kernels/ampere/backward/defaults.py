"""What the family's table of backward choices says of one problem on one device."""

from __future__ import annotations

from functools import cache

from flash_helpers.kernels.ampere.backward.choices import CHOICES, choices_for
from flash_helpers.kernels.ampere.family import AMPERE
from flash_helpers.kernels.defaults import Defaults, gathering_reason, size_for
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.problem import AttentionProblem

PLACE = 1  # behind a family that is made for the device
DETERMINISTIC = "equal bits are wanted: the parts of dQ are added in a fixed order; "


def defaults(problem: AttentionProblem, facts: DeviceFacts) -> Defaults | None:
    """The defaults for a problem; None where the device or the head size has no kernel."""
    choices = choices_for(facts.capability) if AMPERE.runs_on(facts.target) else []
    size = size_for(problem, [(c.config.d_head, c.config.d_head_v) for c in choices])
    if size is None:
        return None
    choice = next(c for c in choices if (c.config.d_head, c.config.d_head_v) == size)
    reason = gathering_reason(problem) + (DETERMINISTIC if problem.deterministic else "") + choice.reason
    chosen = (choice.form(problem.dtype, problem.deterministic), reason)
    return Defaults(chosen, chosen, PLACE)


@cache
def sizes() -> tuple[tuple[int, int], ...]:
    """(d_head, d_head_v) of all choices."""
    return tuple({(choice.config.d_head, choice.config.d_head_v) for choice in CHOICES})
