"""Keys that a layer's indexer has selected for each query, as masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attention.mods import dense_mask

_INSTEAD = 'use attn_implementation="sdpa" or "eager"'


def masks_of_selections(
    module: torch.nn.Module, indices: Tensor | None, block_indices: Tensor | None, q: Tensor, k: Tensor
) -> list[Callable[..., Any]]:
    """Masks under which a query sees the selected keys; none where nothing is selected.

    Args:
        module: the layer; of ``block_indices`` its ``indexer.block_size`` says how long a block is.
        indices: (batch, seq_len_q, any number) of keys.
        block_indices: (batch, heads of the indexer, seq_len_q, any number) of blocks of keys; -1: none. A
            head of the indexer selects for a group of query heads.
        q, k: of the layer, (batch, seq, heads, d).

    Raises:
        NotImplementedError: another shape, or blocks of which nothing says how long they are.
    """
    found = [] if indices is None else [_of_keys(indices, q, k)]
    if block_indices is not None:
        size = getattr(getattr(module, "indexer", None), "block_size", None)
        if type(size) is not int or size < 1:
            raise NotImplementedError(
                f"block_indices came from a {type(module).__name__} without indexer.block_size, so that "
                f"nothing says how many keys a block has: {_INSTEAD}"
            )
        found.append(_of_blocks(block_indices, size, q, k))
    return found


def _of_keys(indices: Tensor, q: Tensor, k: Tensor) -> Callable[..., Any]:
    _check("indices", indices, (q.shape[0], q.shape[1], None))
    return dense_mask(_places(indices, k.shape[1])[:, None])


def _of_blocks(indices: Tensor, size: int, q: Tensor, k: Tensor) -> Callable[..., Any]:
    n_heads = q.shape[2]
    _check("block_indices", indices, (q.shape[0], None, q.shape[1], None))
    if not indices.shape[1] or n_heads % indices.shape[1]:
        raise NotImplementedError(
            f"block_indices has {indices.shape[1]} heads, which do not divide the layer's {n_heads}: "
            f"{_INSTEAD}"
        )
    blocks, group = _places(indices, -(-k.shape[1] // size)), n_heads // indices.shape[1]
    return lambda b, h, q_idx, kv_idx: blocks[b, h // group, q_idx, kv_idx // size]


def _places(indices: Tensor, n: int) -> Tensor:
    """Of each of n places whether it is among the indices; those below 0 are none."""
    found = torch.zeros((*indices.shape[:-1], n + 1), dtype=torch.bool, device=indices.device)
    return found.scatter(-1, torch.where(indices < 0, n, indices).long(), True)[..., :n]


def _check(name: str, indices: Tensor, shape: tuple[int | None, ...]) -> None:
    fits = indices.ndim == len(shape) and all(
        wanted in (None, has) for wanted, has in zip(shape, indices.shape, strict=True)
    )
    if not fits or indices.dtype not in (torch.int32, torch.int64):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise NotImplementedError(
            f"{name} has shape {tuple(indices.shape)} and type {indices.dtype}; known are whole numbers of "
            f"shape ({wanted}), which keys a query sees: {_INSTEAD}"
        )
