"""The place of a query among the keys of its item, for functions of mods: the last query stands at the last
key, as in flash-attn's masks and biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Place = Callable[[Any, Any], Any]  # (b, q_idx) to the place


def in_batches(shift: int) -> Place:
    """Of items that have ``shift`` keys more than queries."""
    return lambda b, q_idx: q_idx + shift


def in_packed(ends_q: Tensor, ends_k: Tensor) -> Place:
    """Of packed sequences with these offsets. These are captured, and no tensor made of them, so that a
    function for the same offsets is the same."""
    if ends_q is ends_k:
        return in_batches(0)
    return lambda b, q_idx: q_idx + (ends_k[b + 1] - ends_k[b]) - (ends_q[b + 1] - ends_q[b])


def in_items(keys: Tensor, queries: Tensor) -> Place:
    """Of items of which each has its own numbers of keys and of queries, (batch,)."""
    shift = keys - queries
    return lambda b, q_idx: q_idx + shift[b]


def in_caches(counts: Tensor, n_queries: int) -> Place:
    """Of items with these numbers of keys, (batch,), and one number of queries."""
    return lambda b, q_idx: q_idx + counts[b] - n_queries


def counted(counts: Tensor | None, room: Tensor | int) -> Tensor:
    """How many rows of each item count, (batch,): counts beyond the room are cut down to it, as the kernels
    cut them.

    Args:
        counts: (batch,); None: all that there is room for, of each its own.
        room: of each item (batch,), or one for all.
    """
    if counts is None:
        assert isinstance(room, Tensor)
        return room
    return counts.clamp(max=room)


def room_for_keys(k: Tensor, cu_seqlens_k: Tensor | None, block_table: Tensor | None) -> Tensor | int:
    """The most keys that a sequence can have: of packed ones, of a cache in one piece, or of pages."""
    if cu_seqlens_k is not None:
        return cu_seqlens_k.diff()
    return k.shape[1] if block_table is None else k.shape[1] * block_table.shape[1]
