"""What a planned launch is told about parts of the keys; the device does the rest (``part_plan.cuh``).

How many parts a sequence's keys are cut into follows there from its own lengths and from these numbers, which
follow from the problem's shape, the kernel's tile and the GPU alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.select.candidates import numeric_class_of
from flash_helpers.select.splits import workspace_bytes

MOST_WAVES = 4
"""``kMostWaves`` of ``part_plan.cuh``."""

WORKSPACE_BYTES = 256 << 20
"""The most workspace of a planned launch, bytes."""

SHORTEST_KEYS = 256  # of a part: what it costs to combine it is small beside what it takes to read it
LONGEST_KEYS = 2048  # of a part of few queries, if the workspace allows it
FEW_QUERIES = 8  # a token and its drafts


@dataclass(frozen=True)
class PartPlan:
    """The numbers of ``flash::PartPlan``, and the workspace that they may ask for.

    Attributes:
        slots: thread blocks that run at a time; 0: keys are not cut.
        shortest: tiles of a part, at least.
        longest: tiles of a part of a sequence with few queries, at most.
        few_queries: these are so many.
        rows: of the workspace.
        fixed: parts of every sequence's keys; 0: the device finds the number.
    """

    slots: int
    shortest: int
    longest: int
    few_queries: int
    rows: int
    fixed: int = 0


def _plan_of_chunks(
    problem: AttentionProblem, config: Any, slots: int, total_q: int, n_splits: int | None
) -> PartPlan:
    """The plan where keys are cut at fixed places alone: whether they are, the device finds.

    A sequence for whose parts the workspace has no room is not cut; its bits are the same.
    """
    shortest, tiles = max(1, SHORTEST_KEYS // config.B_c), max(-(-problem.seq_len_k // config.B_c), 1)
    chunk_tiles = numeric_class_of(config).chunk_tiles
    chunks = -(-tiles // chunk_tiles) if chunk_tiles else 1
    rows = total_q * problem.n_heads
    if chunks == 1 or n_splits == 1 or problem.out_float32 or not (slots or n_splits):
        return PartPlan(0, shortest, tiles, 0, rows if problem.out_float32 else 0, 1)
    longest = max(LONGEST_KEYS // config.B_c, shortest)
    rows = min(rows * chunks, WORKSPACE_BYTES // (4 * (problem.d_head_v + 2)))
    return PartPlan(0 if n_splits else slots, shortest, longest, FEW_QUERIES, rows, n_splits or 0)


def part_plan(
    problem: AttentionProblem, kernel: Kernel, slots: int, total_q: int, n_splits: int | None = None
) -> PartPlan:
    """The plan of a launch. All but ``rows`` are the same for all lengths of the sequences.

    Args:
        problem: the problem; its lengths are the most of one sequence.
        kernel: a kernel with the trait ``planned``.
        slots: thread blocks that run at a time; 0: keys are not to be cut.
        total_q: rows of q.
        n_splits: parts that the caller wants; None: the device decides.
    """
    config = kernel.config
    shortest, tiles = max(1, SHORTEST_KEYS // config.B_c), -(-problem.seq_len_k // config.B_c)
    every_row = total_q * problem.n_heads if problem.out_float32 else 0  # sequences in one part, too
    most = WORKSPACE_BYTES // workspace_bytes(1, 1, problem.d_head_v)
    if problem.invariant:
        return _plan_of_chunks(problem, config, slots, total_q, n_splits)
    if n_splits is not None:
        parts = max(1, min(n_splits, tiles))
        rows = total_q * problem.n_heads * parts if parts > 1 else every_row
        return PartPlan(0, shortest, max(tiles, 1), 0, rows, parts)
    # Parts that fill waves of thread blocks, each with as many rows as a block has.
    group = problem.n_heads // max(problem.n_heads_kv, 1)
    waves = MOST_WAVES * slots * min(config.B_r, problem.seq_len_q * group)
    if not slots or tiles < 2 * shortest or waves > most:
        return PartPlan(0, shortest, max(tiles, 1), 0, every_row)
    # Parts that are no longer than the longest.
    few_rows = problem.batch * min(FEW_QUERIES, problem.seq_len_q) * problem.n_heads
    longest = max(LONGEST_KEYS // config.B_c, shortest)
    while longest < tiles and waves + few_rows * -(-tiles // longest) > most:
        longest *= 2
    capped = min(few_rows, total_q * problem.n_heads) * -(-tiles // longest) if longest < tiles else 0
    return PartPlan(slots, shortest, longest, FEW_QUERIES, every_row + waves + capped)
