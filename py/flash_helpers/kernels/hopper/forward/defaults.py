"""What the Hopper family's tables of choices say of one problem on one device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from flash_helpers.kernels.defaults import Default, Defaults, size_for
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.hopper.family import HOPPER
from flash_helpers.kernels.hopper.forward.choices import CHOICES
from flash_helpers.kernels.hopper.forward.invariant import INVARIANT, invariant_choice
from flash_helpers.kernels.hopper.forward.resources import WARPGROUP_ROWS
from flash_helpers.kernels.hopper.forward.sets import choose_hopper_kernel
from flash_helpers.kernels.problem import MAX_DECODE_ROWS, AttentionProblem
from flash_helpers.kernels.traits import ForwardTraits
from flash_helpers.mods.added import adds_evenly
from flash_helpers.mods.ahead import copied_load, streamed_load

FIRST, LAST = 0, 2  # the Ampere family's place is between them

# Where memory gives each SM so many bytes a second, two small blocks of the Ampere family on an SM were
# faster than one of the Hopper family: by 4 to 19 % on an H200 (36 GB/s an SM), not on an H100 (25 GB/s),
# head size 128 (benchmarks/results/h200-decode.json, h100-decode.json). Since tensor maps have 128 bytes
# brought to the L2 cache at a time they are not, but for head size 96 (h200-decode-families.json); with
# functions of the user's that was not measured.
FAST_MEMORY = 30e9


def defaults(problem: AttentionProblem, facts: DeviceFacts) -> Defaults | None:
    """The defaults for a problem; None where the device or the head size has no kernel."""
    found = size_for(problem, sizes()) if HOPPER.runs_on(facts.target) else None
    if found is None:
        return None

    rows = problem.rows_of_sequence
    if problem.invariant:
        few_blocks = few_blocks_of(problem, facts) == WARPGROUP_ROWS
        only = invariant_choice(problem, size_for(problem, INVARIANT) or found, few_blocks)
        return Defaults(only, only, FIRST)

    def choose(split: bool) -> Default:
        kernel, reason = choose_hopper_kernel(
            problem.dtype,
            found[0],
            problem.causal,
            rows,
            d_head_v=found[1],
            traits=ForwardTraits(**{**problem.features(), "split": split and not problem.planned}),
            n_keys=problem.seq_len_k,
            few_blocks_of=few_blocks_of(problem, facts),
            mod=problem.has_mod,
            dropout=problem.dropout,
            streams=problem.mod is not None and streamed_load(problem.mod) is not None,
            steps=problem.mod is not None and not problem.mod_hides_keys and adds_evenly(problem.mod),
            copies=problem.mod is not None and copied_load(problem.mod) is not None,
            uneven=problem.mod_hides_keys,
        )
        once = split and problem.reads_keys_once(WARPGROUP_ROWS)
        return replace(kernel.config, keys_once=once), reason

    # Time that goes into reading K and V, from a memory that is fast for its number of SMs.
    few = problem.decoding and rows <= MAX_DECODE_ROWS and (problem.has_mod or found[0] == 96)
    small_blocks_are_faster = few and facts.dram_bandwidth > FAST_MEMORY * facts.sm_count
    whole = choose(False)
    # At 1024 keys on an H200, parts of blocks of 128 queries take three times as long as whole blocks of 64.
    small_blocks = whole[0].B_r == WARPGROUP_ROWS and few_blocks_of(problem, facts) == WARPGROUP_ROWS
    return Defaults(
        whole,
        choose(True),
        LAST if small_blocks_are_faster else FIRST,
        in_parts=problem.decoding or not small_blocks,
    )


def few_blocks_of(problem: AttentionProblem, facts: DeviceFacts) -> int | None:
    """The least number of queries whose blocks all find an SM of their own: 64, 128; None: neither does."""
    for rows in (WARPGROUP_ROWS, 2 * WARPGROUP_ROWS):
        if -(-problem.seq_len_q // rows) * problem.batch * problem.n_heads <= facts.sm_count:
            return rows
    return None


@cache
def sizes() -> tuple[tuple[int, int], ...]:
    """(d_head, d_head_v) of all choices."""
    return tuple({(choice.config.d_head, choice.config.d_head_v) for choice in CHOICES})
