"""What the Ampere family's table of choices says of one problem on one device."""

from __future__ import annotations

from functools import cache

from flash_helpers.kernels.ampere.family import AMPERE
from flash_helpers.kernels.ampere.forward.choices import CHOICES, choose_ampere_kernel
from flash_helpers.kernels.ampere.forward.decode import (
    choose_ampere_decode_config,
    choose_ampere_planned_config,
)
from flash_helpers.kernels.ampere.forward.invariant import invariant_choice
from flash_helpers.kernels.defaults import Default, Defaults, size_for
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.problem import MAX_DECODE_ROWS, AttentionProblem

PLACE = 1  # behind a family that is made for the device
PLANNED_REASON = "for chunks and decoding in one launch, by its resources, for want of measurements"
DECODE_REASON = "few queries over many keys: K and V are read once, and shared memory holds copies under way"


def defaults(problem: AttentionProblem, facts: DeviceFacts) -> Defaults | None:
    """The defaults for a problem; None where the device or the head size has no kernel."""
    found = size_for(problem, sizes()) if AMPERE.runs_on(facts.target) else None
    if found is None:
        return None

    if problem.invariant:
        whole, split = (invariant_choice(problem, found[0], facts, in_parts) for in_parts in (False, True))
        return Defaults(whole, split, PLACE)

    def choose(split: bool) -> Default:
        if (split or problem.planned) and problem.rows_of_sequence <= MAX_DECODE_ROWS:
            return choose_ampere_decode_config(problem.dtype, found[0], facts), DECODE_REASON
        if problem.planned:
            return choose_ampere_planned_config(problem.dtype, found[0], facts), PLANNED_REASON
        kernel, reason = choose_ampere_kernel(
            problem.dtype,
            found[0],
            problem.masked or problem.mod_hides_keys,
            problem.seq_len_q,
            facts.capability,
            # Partial results are combined by their LSEs; dropped weights count in the sums.
            lse=problem.lse or split or problem.dropout,
            exact=split or problem.has_mod,  # parts, and masks of the user's, leave no other
        )
        return kernel.config, reason

    return Defaults(choose(False), choose(True), PLACE)


@cache
def sizes() -> tuple[tuple[int, int], ...]:
    """(d_head, d_head_v) of all choices."""
    return tuple({(choice.config.d_head, choice.config.d_head_v) for choice in CHOICES})
