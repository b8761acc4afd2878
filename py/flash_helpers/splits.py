"""How many thread blocks share the keys of a query block, when there are too few of those for the GPU."""

from __future__ import annotations

MAX_SPLITS = 256  # kMaxSplits in src/include/split_combine.cuh
MIN_KEYS = 256  # of one part: less would be spent on starting and combining
WAVES = 4  # parts are this many times what runs at a time, so that an uneven end costs little


def n_splits(blocks: int, at_a_time: int, sm_count: int, keys: int) -> int:
    """The number of parts; 1: do not split.

    It follows from shapes and the device alone, so that equal calls are split, and so rounded, equally. The
    workspace has a row of d_head_v + 1 float32 for each part of a query: at most (WAVES * at_a_time + blocks)
    blocks of B_r rows, which is 75 MB with B_r = 128 and d_head_v = 128 on an H100 with 2 blocks an SM.

    Args:
        blocks: query blocks of all heads and batch items.
        at_a_time: thread blocks that run at a time.
        sm_count: multiprocessors; from one query block each on, nothing is split.
        keys: that one query block visits.
    """
    if not 0 < blocks < sm_count:
        return 1
    return max(1, min(-(-WAVES * at_a_time // blocks), keys // MIN_KEYS, MAX_SPLITS))
