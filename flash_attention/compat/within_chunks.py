"""Attention within chunks: a query sees the keys of its own chunk of so many places, counted from 0."""

from __future__ import annotations

from typing import Any

from flash_attention.checks.options import given
from flash_attention.compat.places import Place


def checked_chunk(attention_chunk: int) -> int:
    """Places of a chunk; 0: there are none. TypeError: no int; ValueError: less than 0."""
    if type(attention_chunk) is not int or attention_chunk < 0:
        error = ValueError if type(attention_chunk) is int else TypeError
        raise error(
            f"attention_chunk is {given(attention_chunk)}; it must be an int, at least 0: the places of a "
            "chunk, or 0 for none"
        )
    return attention_chunk


def within_chunks(size: int, place: Place) -> Any:
    """``mask_mod`` of chunks.

    Args:
        size: places of a chunk.
        place: of a query among the keys.
    """
    return lambda b, h, q_idx, kv_idx: place(b, q_idx) // size == kv_idx // size
