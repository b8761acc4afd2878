"""What ``compat/packed_cache.py`` refuses before it writes: every tensor, as the caller gave it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attention.checks.calls import check_inputs
from flash_attention.checks.layouts import (
    check_block_table,
    check_counts,
    check_counts_row,
    check_max_seqlen,
    check_offset_values,
    check_offsets,
)
from flash_attention.checks.options import checked_scale
from flash_attention.compat import kv_cache_checks
from flash_attention.layouts import BATCHES, PACKED
from flash_attention.options import Options
from flash_attention.run.tracing import is_read_later, is_readable, wants_autocast
from flash_attention.torch_private import assert_async


def check_packed_call(tensors: dict[str, Any], max_seqlen_q: int | None, options: dict[str, Any]) -> None:
    """Shapes, types, devices and memory of all tensors, by their names in the call."""
    q, k_cache, v_cache = (tensors[name] for name in ("q", "k_cache", "v_cache"))
    cu_q, packed = tensors["cu_seqlens_q"], tensors["cu_seqlens_q"] is not None
    kv_cache_checks.check_tensor_kinds(tensors, 3 if packed else 4)
    layout = PACKED if packed else BATCHES
    any_dtype = wants_autocast(q, k_cache, v_cache)
    names = ("q", "k_cache", "v_cache")
    if packed:
        check_offsets("cu_seqlens_q", cu_q, q)
        if max_seqlen_q is None:
            raise ValueError(
                "cu_seqlens_q is given without max_seqlen_q: pass the most queries of one sequence"
            )
        check_max_seqlen("max_seqlen_q", max_seqlen_q)
        if is_readable(cu_q):
            check_offset_values("cu_seqlens_q", cu_q, q.shape[0], "max_seqlen_q", max_seqlen_q)
    elif max_seqlen_q is not None:
        check_max_seqlen("max_seqlen_q", max_seqlen_q)
        if q.shape[1] > max_seqlen_q:
            raise ValueError(
                f"max_seqlen_q is {max_seqlen_q}, and each item of q has {q.shape[1]} queries: pass None, or "
                f"at least {q.shape[1]}"
            )
    kv_cache_checks.check_cache_axes(k_cache, v_cache)
    check_inputs(
        q, k_cache, v_cache, None, layout, True, padded=True, any_dtype=any_dtype, names=names,
        layout_kv=BATCHES,
    )  # fmt: skip
    batch = cu_q.numel() - 1 if packed else q.shape[0]
    _check_cache(tensors, batch, q)
    if not torch.compiler.is_compiling():
        Options(**options).checked(q)
        checked_scale(options["softmax_scale"], q.shape[-1])
    _check_idle(tensors, batch, q)
    if tensors["k"] is None and tensors["v"] is None:
        if tensors["rotary_cos"] is not None or tensors["rotary_sin"] is not None:
            kv_cache_checks.check_rotary(tensors["rotary_cos"], tensors["rotary_sin"], q, None)
        return
    _check_new(tensors, batch, q)


def _check_cache(tensors: dict[str, Any], batch: int, q: Tensor) -> None:
    """Which items and pages there are, and where their keys begin."""
    k_cache, table, items = tensors["k_cache"], tensors["block_table"], tensors["cache_batch_idx"]
    if items is not None:
        if items.dtype not in (torch.int32, torch.int64) or tuple(items.shape) != (batch,):
            raise ValueError(
                f"cache_batch_idx is {items.dtype} of shape {tuple(items.shape)}; it must be int32 or int64 "
                f"of shape ({batch},)"
            )
        kv_cache_checks.check_items(items, k_cache, tensors["k"] is not None, table)
    if table is not None:
        check_block_table(table, q, table.shape[0] if items is not None and table.ndim == 2 else batch)
    elif items is None and k_cache.shape[0] < batch:
        raise ValueError(
            f"there are {batch} batch items, and k_cache and v_cache have {k_cache.shape[0]}; they need at "
            "least as many: pass larger ones, or cache_batch_idx, the cache's item for each of q's"
        )
    if (leftpad := tensors["cache_leftpad"]) is None:
        return
    check_counts_row("cache_leftpad", leftpad, batch, q.device)
    if is_readable(leftpad):
        check_counts("cache_leftpad", leftpad, "rows")
    for name in ("k_cache", "v_cache"):
        cache = tensors[name]
        if min(cache.shape[:2]) > 1 and cache.stride(0) != cache.shape[1] * cache.stride(1):
            raise ValueError(
                f"{name} has strides {cache.stride()}; with cache_leftpad its rows must follow each other "
                "from one item or page to the next: pass a contiguous one"
            )


def _check_idle(tensors: dict[str, Any], batch: int, q: Tensor) -> None:
    """Arguments of what is appended, which callers also pass where nothing is: then they say nothing."""
    if (ends := tensors["cu_seqlens_k_new"]) is not None:
        check_offsets("cu_seqlens_k_new", ends, q)
        if ends.numel() != batch + 1:
            raise ValueError(f"cu_seqlens_k_new has {ends.numel()} entries; it needs batch + 1, {batch + 1}")
    if (begins := tensors["rotary_seqlens"]) is not None:
        check_counts_row("rotary_seqlens", begins, batch, q.device)
        if is_readable(begins):
            check_counts("rotary_seqlens", begins, "positions")


def _check_new(tensors: dict[str, Any], batch: int, q: Tensor) -> None:
    """What is appended."""
    k, v, ends = tensors["k"], tensors["v"], tensors["cu_seqlens_k_new"]
    if k is None or v is None:
        raise ValueError("k and v must be given together: both are appended to the cache, or neither")
    if tensors["cache_seqlens"] is None:
        raise ValueError(
            "k and v are given without cache_seqlens: pass how many keys there are, behind which these "
            "are appended"
        )
    packed, batches = "(total_new, n_heads_kv, d)", f"(batch {batch}, seq_len_new, n_heads_kv, d)"
    if ends is not None:
        wanted = f"with cu_seqlens_k_new it must be {packed}"
    else:
        wanted = f"it must be {batches}, or with offsets {packed}"
    for name, new in (("k", k), ("v", v)):
        cache = tensors[f"{name}_cache"]
        rank = 4 if ends is None else 3
        if new.ndim != rank or new.shape[-2:] != cache.shape[-2:] or (rank == 4 and new.shape[0] != batch):
            raise ValueError(
                f"{name} has shape {tuple(new.shape)}; {wanted}, with the heads of {name}_cache, "
                f"{tuple(cache.shape[-2:])}"
            )
        if new.dtype is not cache.dtype:
            raise TypeError(f"{name} is {new.dtype}, {name}_cache {cache.dtype}: convert {name}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k and v must have one length; given {tuple(k.shape)} and {tuple(v.shape)}")
    if ends is not None and is_readable(ends):
        check_offset_values("cu_seqlens_k_new", ends, k.shape[0], "the rows of k", k.shape[0])
    if ends is not None and is_read_later(ends):
        assert_async(
            (ends[0] == 0) & (ends.diff() >= 0).all() & (ends[-1] <= k.shape[0]),
            "cu_seqlens_k_new does not start with 0, decreases, or ends beyond the rows of k",
        )
    if tensors["k_cache"] is tensors["v_cache"]:
        raise ValueError(
            "k_cache and v_cache overlap in memory, and k and v are appended: each needs memory of its own"
        )
    kv_cache_checks.check_apart(tensors)
    if tensors["rotary_cos"] is not None or tensors["rotary_sin"] is not None:
        kv_cache_checks.check_rotary(tensors["rotary_cos"], tensors["rotary_sin"], q, k)


def check_padding(leftpad: Tensor | None, before: Tensor) -> None:
    """Padding on the left, which is a part of the rows that an item has, where both can be read."""
    if leftpad is not None and is_read_later(leftpad):
        assert_async(
            ((leftpad >= 0) & (leftpad <= before)).all(),
            "cache_leftpad has a number below 0, or above that of cache_seqlens, which counts the rows of "
            "padding, too",
        )
    if leftpad is None or not (is_readable(leftpad) and is_readable(before)):
        return
    for item in (leftpad > before).nonzero().flatten().tolist()[:1]:
        raise ValueError(
            f"cache_leftpad has {int(leftpad[item])} for item {item}, and cache_seqlens {int(before[item])}, "
            "which counts the rows of padding, too: it must be at least as many"
        )


def check_room(before: Tensor, added: Tensor, capacity: int) -> None:
    """Keys of each item before and with k and v, where they can be read. Their int32 sums may be negative."""
    kv_cache_checks.assert_room(before, added, capacity)
    if not (is_readable(before) and is_readable(added) and before.numel()):
        return
    if (most := int((before.long() + added).max())) > capacity:
        raise ValueError(
            f"cache_seqlens and the rows of k and v make {most} keys of an item: the cache "
            f"holds {capacity} an item; make it larger, or pass a block_table with more pages"
        )


def check_nothing_new(ends: Tensor) -> None:
    """Packed rows for a cache that holds none: all are padding. Where that can be read, it was (above)."""
    if not is_readable(ends):
        assert_async(
            ends[-1] == 0, "k and v append rows, and k_cache and v_cache hold none: make them larger"
        )
