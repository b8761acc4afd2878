"""Queries, keys and values that lie in one tensor: the tensors in it, of which nothing is copied."""

from __future__ import annotations

from torch import Tensor

from flash_attention.checks.calls import check_head_sizes, check_kinds
from flash_attention.checks.tensors import check_tensors
from flash_attention.run.tracing import wants_autocast


def unpacked(name: str, packed: Tensor, shape: tuple[str, ...], q: Tensor | None = None) -> list[Tensor]:
    """The tensors of a packed one of this shape, by the names of its sizes. One is their number.

    Args:
        q: the queries, where they are not among the packed ones.
    """
    tensors = {name: packed} if q is None else {"q": q, name: packed}
    check_tensors(tensors)
    n = int(shape[-3])
    if packed.ndim != len(shape) or packed.shape[-3] != n:
        raise ValueError(
            f"{name} has shape {tuple(packed.shape)}; it must be ({', '.join(shape)}): stack the {n} tensors "
            "along the third dimension from the end"
        )
    first = packed if q is None else q
    check_kinds(tensors, any_dtype=wants_autocast(first, packed, packed))
    if q is not None and q.ndim != packed.ndim - 1:
        axes = "(batch, seq_len_q, n_heads, d_head)" if packed.ndim == 5 else "(total_q, n_heads, d_head)"
        raise ValueError(
            f"q has shape {tuple(q.shape)}; it must be {axes} beside {name} {tuple(packed.shape)}"
        )
    if q is not None and packed.ndim == 5 and q.shape[0] != packed.shape[0]:
        raise ValueError(f"q has {q.shape[0]} batch items and {name} {packed.shape[0]}: give both the same")
    if q is not None and q.shape[-1:] != packed.shape[-1:]:
        raise ValueError(
            f"q and {name} must have one head size; given {tuple(q.shape)} and {tuple(packed.shape)}"
        )
    check_head_sizes(packed.shape[-1], packed.shape[-1], (name, name), padded=True)
    return list(packed.unbind(-3))
