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


def in_items(shift: Tensor) -> Place:
    """Of items of which each has its own number of keys more than queries, (batch,)."""
    return lambda b, q_idx: q_idx + shift[b]


def in_caches(counts: Tensor, n_queries: int) -> Place:
    """Of items with these numbers of keys, (batch,), and one number of queries."""
    return lambda b, q_idx: q_idx + counts[b] - n_queries
