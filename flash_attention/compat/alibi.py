"""flash-attn's linear bias (ALiBi) as a function of scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attention.checks.options import given
from flash_attention.checks.tensors import check_tensors
from flash_attention.compat.places import Place


def checked_slopes(alibi_slopes: object, q: Tensor, batch: int) -> Tensor:
    """Slopes of a call.

    Args:
        q: the queries; the last dimension but one counts their heads.
        batch: items, or sequences.

    Raises:
        TypeError, ValueError: no float32 tensor (n_heads,) or (batch, n_heads) on the device of q.
    """
    if not isinstance(alibi_slopes, Tensor):
        raise TypeError(f"alibi_slopes is {given(alibi_slopes)}; it must be a tensor of float32, or None")
    check_tensors({"alibi_slopes": alibi_slopes, "q": q})
    if alibi_slopes.dtype is not torch.float32:
        raise TypeError(f"alibi_slopes has the type {alibi_slopes.dtype}; it must be float32: .float()")
    n_heads = q.shape[-2] if q.ndim > 2 else 0
    shape, n_dims = alibi_slopes.shape, alibi_slopes.ndim
    if n_dims not in (1, 2) or shape[-1] != n_heads or (n_dims == 2 and shape[0] != batch):
        raise ValueError(
            f"alibi_slopes has shape {tuple(alibi_slopes.shape)}; it must be ({n_heads},), one slope a head "
            f"of q, or ({batch}, {n_heads}), one also for each item"
        )
    if alibi_slopes.device != q.device:
        raise ValueError(f"alibi_slopes is on {alibi_slopes.device}, and q on {q.device}: move it there")
    return alibi_slopes


def alibi(slopes: Tensor, place: Place, ordered: bool) -> Any:
    """``score_mod`` that takes ``slope * |place of the query - place of the key|`` from each score.

    Args:
        slopes: (n_heads,) or (batch, n_heads).
        place: of a query.
        ordered: no query sees a key behind its place, so that no difference is negative.
    """
    if slopes.ndim == 1:
        if ordered:
            return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - place(b, q_idx))
        return lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (place(b, q_idx) - kv_idx).abs()
    if ordered:
        return lambda score, b, h, q_idx, kv_idx: score + slopes[b, h] * (kv_idx - place(b, q_idx))
    return lambda score, b, h, q_idx, kv_idx: score - slopes[b, h] * (place(b, q_idx) - kv_idx).abs()


def is_ordered(options: dict[str, Any]) -> bool:
    """Whether masks of a call show no query a key behind its place, by its keywords of ``attention``."""
    right = options["window"][1]
    return options["causal"] is True or (type(right) is int and right == 0)
