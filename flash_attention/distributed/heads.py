"""Head counts, how ``ulysses`` deals heads out, and in how many parts ``all_gather`` sends them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

BLOCK = 128  # rows that a thread block takes
LEAST_BLOCKS = 256
"""So many blocks of queries a call for a part of the heads has at least, two for each SM of a large GPU."""
LEAST_KEY_BLOCKS = 512
"""Likewise of keys, in the backward pass."""


class Heads(NamedTuple):
    """Head counts of a call."""

    q: int
    kv: int

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.q // self.kv if self.kv else 1


# ---------------------------------------------------------------------- of a rank
def dealt(heads: Heads, world: int, rank: int) -> tuple[int, int]:
    """(first, last) of the query heads of a rank, as equal as can be.

    Where every rank gets whole groups of them, a key head is on one rank alone.
    """
    unit = heads.group if heads.kv and heads.kv % world == 0 else 1
    size, longer = divmod(heads.q // unit, world)
    first = size * rank + min(rank, longer)
    return unit * first, unit * (first + size + (rank < longer))


def key_heads_of(heads: Heads, first: int, last: int) -> tuple[int, int]:
    """(first, last) of the key heads that some query heads read."""
    return (first // heads.group, -(-last // heads.group)) if first < last else (0, 0)


def even_groups(heads: Heads, first: int, last: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Some query heads and their key heads, counted within them, as ranges of which every key head serves
    equally many."""
    group = heads.group
    first_kv, head = key_heads_of(heads, first, last)[0], first
    while head < last:
        if head % group == 0 and head + group <= last:
            end = head + (last - head) // group * group
        else:  # a part of one group
            end = min(last, (head // group + 1) * group)
        yield (head - first, end - first), (head // group - first_kv, -(-end // group) - first_kv)
        head = end


# ---------------------------------------------------------------------- of an exchange
def parts_of_heads(
    heads: Heads, queries: int, keys: int, backward: bool
) -> tuple[tuple[int, int] | None, ...]:
    """(first, last) of the key heads of each exchange of ``all_gather``; None: all in one.

    A rank computes on a part while the next travels, and waits for the first alone, which is a quarter or a
    half. One exchange it is where a part would be too little work to fill a GPU.

    Args:
        heads: of the call.
        queries: how many a call has.
        keys: how many it sees.
        backward: of which pass.
    """
    least = LEAST_KEY_BLOCKS if backward else LEAST_BLOCKS
    for share in (4, 2):
        first = -(-heads.kv // share)
        blocks = first * (keys // BLOCK if backward else heads.group * (queries // BLOCK))
        if first < heads.kv and blocks >= least:
            return (0, first), (first, heads.kv)
    return (None,)
