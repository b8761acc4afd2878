"""Mods of whole tensors: a bias that is added to the scores, and a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_helpers.messages import named_type

AXES = ("batch", "n_heads", "seq_len_q", "seq_len_k")


def dense_bias(bias: Tensor) -> Callable[..., Any]:
    """A ``score_mod`` that adds an element of a tensor to each scaled score; -inf hides the key.

    Args:
        bias: of (batch, n_heads, seq_len_q, seq_len_k) the last two to four dimensions; a dimension of size 1
            holds for all. float16, bfloat16 or float32, any strides. Beyond its end it adds 0.

    Raises:
        TypeError: no tensor, or one of another type.
        ValueError: too few or too many dimensions.
    """
    if _checked("bias", bias).dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(
            f"bias has the type {bias.dtype}; it must be float16, bfloat16 or float32. For a mask of bools "
            "call dense_mask"
        )
    table, axes = _without_broadcast(bias)

    def add_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + element(table, axes, (b, h, q_idx, kv_idx))

    return add_bias


def dense_mask(mask: Tensor) -> Callable[..., Any]:
    """A ``mask_mod`` under which a query sees the keys for which a tensor holds True.

    Args:
        mask: bool, of the shapes of ``dense_bias``. Beyond its end nothing is seen.

    Raises:
        as ``dense_bias``.
    """
    if _checked("mask", mask).dtype is not torch.bool:
        raise TypeError(
            f"mask has the type {mask.dtype}; it must be bool. For numbers that are added call dense_bias"
        )
    table, axes = _without_broadcast(mask)

    def is_seen(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = element(table, axes, (b, h, q_idx, kv_idx))
        return seen if axes else torch.where(q_idx >= 0, seen, False)

    return is_seen


def element(table: Tensor, axes: tuple[int, ...], indices: tuple[Any, ...]) -> Any:
    """``table`` at those of the indices that it has dimensions for; a table without any, itself."""
    return table[tuple(indices[axis] for axis in axes)] if axes else table


def _checked(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {named_type(x)}; it must be a tensor")
    if not 2 <= x.ndim <= len(AXES):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; it must have two to four dimensions, the last of "
            f"({', '.join(AXES)})"
        )
    return x


def _without_broadcast(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A view without the dimensions that hold for all, and the places among ``AXES`` of those that stay.

    What depends on fewer indices is read less often.
    """
    first = len(AXES) - x.ndim
    kept = [axis for axis in range(x.ndim) if x.shape[axis] != 1 and (x.stride(axis) or not x.shape[axis])]
    for axis in reversed(range(x.ndim)):
        if axis not in kept:
            with torch.enable_grad():  # a view that no_grad made would be a leaf of its own
                x = x.select(axis, 0)
    return x, tuple(first + axis for axis in kept)
