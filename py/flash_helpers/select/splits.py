"""Into how many parts the keys of a small problem are cut, so that its thread blocks fill the GPU.

The number follows from the problem's shape, the kernel's tile and the GPU alone: never from the lengths or
the contents of sequences, so that equal calls are cut, and rounded, alike.
"""

from __future__ import annotations

from flash_helpers.kernels.problem import MAX_SPLITS, AttentionProblem

__all__ = [
    "MAX_SPLITS",
    "WORKSPACE_BYTES",
    "chunk_parts",
    "n_splits",
    "workspace_bytes",
]

WORKSPACE_BYTES = 64 << 20
"""The most workspace that splitting takes, bytes."""

# In steps of one tile of keys, which take 1 to 3 us on an H100 (32 KiB of K and V a thread block).
BLOCK_STEPS = 2.0  # a thread block's begin and end: its first copies under way, its partial result stored
COMBINE_STEPS = 3.0  # the second kernel: its launch, above all
COMBINE_STEPS_PER_PART = 1 / 64  # ... which reads every part


def n_splits(
    row_blocks: int, rows: int, key_tiles: int, d_head_v: int, *, sm_count: int, blocks_per_sm: int
) -> int:
    """The number of parts that is expected to take least time; 1: the keys are not split.

    Thread blocks run in waves of ``sm_count * blocks_per_sm``. With n parts there are n times as many, each
    of which takes the steps of ``key_tiles / n`` tiles and a fixed number; a second kernel combines them. Of
    numbers that are equally good the smallest is taken.

    Args:
        row_blocks: thread blocks without splitting: batch * query heads * blocks of B_r queries. Grouped
            heads that have become rows of one head count once.
        rows: batch * heads * seq_len_q, the rows of the workspace.
        key_tiles: tiles of B_c keys that the longest sequence has.
        d_head_v: columns of the output.
        sm_count: multiprocessors of the GPU.
        blocks_per_sm: thread blocks of the kernel that a multiprocessor holds.

    Returns:
        1 ... ``MAX_SPLITS``, at most one part a tile, with ``workspace_bytes`` up to ``WORKSPACE_BYTES``.
    """
    if min(row_blocks, rows, key_tiles) < 1:
        return 1
    slots = sm_count * blocks_per_sm

    def steps(parts: int) -> float:
        waves = -(-row_blocks * parts // slots)
        combine = COMBINE_STEPS + parts * COMBINE_STEPS_PER_PART if parts > 1 else 0.0
        return waves * (-(-key_tiles // parts) + BLOCK_STEPS) + combine

    most = min(MAX_SPLITS, key_tiles, WORKSPACE_BYTES // workspace_bytes(1, rows, d_head_v))
    return min(range(1, most + 1), key=steps, default=1)


def chunk_parts(problem: AttentionProblem, chunk_keys: int) -> int:
    """The parts of a problem whose keys are cut at fixed places only; 1 where there would be too many.

    Args:
        problem: the problem.
        chunk_keys: keys of a chunk; 0: they are not cut.
    """
    chunks = -(-problem.seq_len_k // chunk_keys) if chunk_keys else 1
    rows = problem.batch * problem.n_heads * problem.seq_len_q
    workspace = 4 * chunks * rows * (problem.d_head_v + 2)  # outputs that are not divided, sums, exponents
    return max(chunks, 1) if chunks <= MAX_SPLITS and workspace <= WORKSPACE_BYTES else 1


def workspace_bytes(parts: int, rows: int, d_head_v: int) -> int:
    """Bytes of the partial outputs and their log-sum-exps, float32.

    Args:
        parts: number of parts.
        rows: batch * heads * seq_len_q.
        d_head_v: columns of the output.
    """
    return 4 * parts * rows * (d_head_v + 1)
