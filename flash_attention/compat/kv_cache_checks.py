"""What ``compat/kv_cache.py`` refuses before it writes: every tensor, as the caller gave it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attention.checks.calls import check_inputs
from flash_attention.checks.layouts import check_block_table, check_pages, pages_with_keys
from flash_attention.checks.memory import overlap, overlaps_itself, span_bytes
from flash_attention.checks.options import checked_scale
from flash_attention.checks.tensors import check_memory, check_no_gradient, check_tensors
from flash_attention.compat.padding import missing_columns
from flash_attention.layouts import BATCHES
from flash_attention.options import Options
from flash_attention.run.tracing import is_read_later, is_readable, stands_for_another, wants_autocast
from flash_attention.torch_private import assert_async

ROTARY_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_tensor_kinds(tensors: dict[str, Any], rank: int = 4) -> None:
    """Tensors on one device, by their names in the call.

    All but the first three may be None, and ``cache_seqlens`` one count for all items.

    Args:
        rank: of q; 3: packed queries.
    """
    required = ("q", "k_cache", "v_cache")
    given = {
        name: x
        for name, x in tensors.items()
        if name in required or not (x is None or (name == "cache_seqlens" and not isinstance(x, Tensor)))
    }
    check_tensors(given)
    check_no_gradient(
        given, "attention over a cache has no gradient", "call flash_attn_func on tensors that stay"
    )
    q = given["q"]
    if q.ndim != rank:
        axes = (
            "it must be (batch, seq_len_q, n_heads, d_head)"
            if rank == 4
            else "with cu_seqlens_q it must be (total_q, n_heads, d_head)"
        )
        raise ValueError(f"q has shape {tuple(q.shape)}; {axes}")
    for name, x in given.items():
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}: move it with .to(q.device)")
    check_memory(_in_memory(tensors))


def check_call(q: Tensor, k_cache: Tensor, v_cache: Tensor, shared: bool, options: dict[str, Any]) -> None:
    """What ``attention_cached`` would refuse once the cache has changed, and the head sizes as they are.

    Args:
        shared: the first dimension of the cache does not count q's batch items.
        options: keywords of ``attention``.
    """
    compiling = torch.compiler.is_compiling()
    if compiling and not any(map(missing_columns, (q, k_cache, v_cache))):
        return  # operators are checked while they are recorded, when nothing is written
    any_dtype = wants_autocast(q, k_cache, v_cache)
    names = ("q", "k_cache", "v_cache")
    check_inputs(q, k_cache, v_cache, None, BATCHES, shared, padded=True, any_dtype=any_dtype, names=names)
    if not compiling:
        Options(**options).checked(q)
        checked_scale(options["softmax_scale"], q.shape[-1])


def _in_memory(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors among them, or none where what happens to them is only recorded."""
    given = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
    if torch.compiler.is_compiling() or any(x.is_meta or stands_for_another(x) for x in given.values()):
        return {}
    return given


def check_apart(tensors: dict[str, Any]) -> None:
    """Caches that are written: no place standing for two, and apart from all that is read."""
    given = _in_memory(tensors)
    if not given:
        return
    begins = {name: x.data_ptr() for name, x in given.items()}
    ends = {name: begins[name] + span_bytes(x) for name, x in given.items()}
    for name in ("k_cache", "v_cache"):
        cache = given[name]
        if overlaps_itself(cache):
            raise ValueError(
                f"elements of {name} share memory (shape {tuple(cache.shape)}, strides {cache.stride()}), "
                f"and k and v are appended: pass {name}.contiguous(), and keep it"
            )
        for other, x in given.items():
            near = begins[name] < ends[other] and begins[other] < ends[name]
            if other != name and near and overlap(cache, x):
                pair = "k_cache and v_cache" if other == "v_cache" else f"{name} and {other}"
                raise ValueError(
                    f"{pair} overlap in memory, and k and v are appended: each needs memory of its own"
                )


def check_rotary(cos: Tensor | None, sin: Tensor | None, q: Tensor, k: Tensor | None) -> None:
    """Tables of cosines and sines, floating-point, of one shape, with at most q's columns."""
    if k is None:
        raise ValueError("rotary_cos and rotary_sin are given without k and v: rotate q before the call")
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin must be given together")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table.dtype not in ROTARY_TYPES:
            raise TypeError(
                f"{name} is {table.dtype}; it must be one of {', '.join(map(str, ROTARY_TYPES))}: convert it"
            )
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[-1]:
        raise ValueError(
            f"rotary_cos has shape {tuple(cos.shape)}, rotary_sin {tuple(sin.shape)}; both must be "
            f"(seq_len_rotary, d_rotary / 2) with d_rotary at most the head size {q.shape[-1]}"
        )


def check_pages_of(
    block_table: Tensor | None,
    counts: Tensor,
    k_cache: Tensor,
    rows: Tensor | None = None,
    begins: Tensor | None = None,
) -> None:
    """Pages that hold keys, where they can be read. Arguments as of ``check_pages``."""
    if block_table is None:
        return
    if is_read_later(block_table):
        table = block_table if rows is None else block_table[rows.long()]
        used = pages_with_keys(table, counts, k_cache, begins)
        assert_async(
            ~(used & ((table < 0) | (table >= k_cache.shape[0]))).any(),
            "the table of pages names a page that k_cache and v_cache do not have, for keys that an item has",
        )
    if not torch.compiler.is_compiling() and is_readable(block_table):
        check_pages(block_table, counts, k_cache, rows, begins, "k_cache and v_cache")


def check_cache_axes(k_cache: Tensor, v_cache: Tensor) -> None:
    """Caches of one shape, but for the head size."""
    if not k_cache.ndim == v_cache.ndim == 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"k_cache and v_cache must be (batch or pages, tokens, n_heads_kv, d) and agree; given "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )


def check_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
) -> None:
    """Shapes of the cache and of what is appended; the rest is ``attention``'s."""
    batch = q.shape[0]
    check_cache_axes(k_cache, v_cache)
    if block_table is None and cache_batch_idx is None and k_cache.shape[0] < batch:
        raise ValueError(
            f"q has {batch} batch items, k_cache and v_cache {k_cache.shape[0]}; they need at least as many: "
            "pass larger ones, or cache_batch_idx, the cache's item for each of q's"
        )
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together: both are appended to the cache, or neither")
    if k is not None and v is not None:
        if k_cache is v_cache:  # seen here also where nobody knows addresses, as in torch.compile
            raise ValueError(
                "k_cache and v_cache overlap in memory, and k and v are appended: each needs memory of its "
                "own"
            )
        if cache_seqlens is None:
            raise ValueError(
                "k and v are given without cache_seqlens: pass how many keys there are, behind which these "
                "are appended"
            )
        for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
            if new.ndim != 4 or new.shape[0] != batch or new.shape[2:] != cache.shape[2:]:
                raise ValueError(
                    f"{name} has shape {tuple(new.shape)}; it must be ({batch}, seq_len_new, "
                    f"{cache.shape[2]}, {cache.shape[3]}), as q's batch and {name}_cache say"
                )
            if new.dtype is not cache.dtype:
                raise TypeError(f"{name} is {new.dtype}, {name}_cache {cache.dtype}: convert {name}")
        if k.shape[1] != v.shape[1]:
            raise ValueError(f"k and v must have one length; given {k.shape[1]} and {v.shape[1]}")
    if cache_batch_idx is not None and (
        cache_batch_idx.dtype not in (torch.int32, torch.int64)
        or tuple(cache_batch_idx.shape) != (batch,)
        or cache_batch_idx.device != q.device
    ):
        raise ValueError(
            f"cache_batch_idx is {cache_batch_idx.dtype} of shape {tuple(cache_batch_idx.shape)} on "
            f"{cache_batch_idx.device}; it must be int32 or int64 of shape ({batch},) on {q.device}"
        )
    if block_table is None:
        return
    check_block_table(block_table, q)


def check_items(
    cache_batch_idx: Tensor | None, k_cache: Tensor, appended: bool, table: Tensor | None = None
) -> None:
    """Items that the cache has, each once if it is written, as far as ``check_room`` can see it.

    Args:
        table: the pages of each item; None: the cache is in one piece.
    """
    if cache_batch_idx is None:
        return
    if table is not None and table.ndim == 2:
        _check_table_rows(cache_batch_idx, table)
    else:
        _check_cache_items(cache_batch_idx, k_cache)
    if not (appended and is_readable(cache_batch_idx)):
        return
    if cache_batch_idx.unique().numel() < cache_batch_idx.numel():
        raise ValueError(
            f"cache_batch_idx is {cache_batch_idx.tolist()}, and k and v are appended: name no item twice"
        )


def _check_table_rows(cache_batch_idx: Tensor, table: Tensor) -> None:
    n = table.shape[0]
    if is_read_later(cache_batch_idx):
        assert_async(
            ((cache_batch_idx >= 0) & (cache_batch_idx < n)).all(),
            "cache_batch_idx names a row that the table of pages does not have: give rows from 0 on, below "
            "their number",
        )
    for item in cache_batch_idx.tolist() if is_readable(cache_batch_idx) else ():
        if not 0 <= item < n:
            there = f"the rows 0 to {n - 1}" if n else "no row"
            raise ValueError(f"cache_batch_idx has {item}; block_table has {there}")


def _check_cache_items(cache_batch_idx: Tensor, k_cache: Tensor) -> None:
    if is_read_later(cache_batch_idx):
        assert_async(
            ((cache_batch_idx >= 0) & (cache_batch_idx < k_cache.shape[0])).all(),
            "cache_batch_idx names an item that k_cache does not have: give items from 0 on, below its batch "
            "size",
        )
    for item in cache_batch_idx.tolist() if is_readable(cache_batch_idx) else ():
        if not 0 <= item < k_cache.shape[0]:
            there = f"the items 0 to {k_cache.shape[0] - 1}" if k_cache.shape[0] else "no item"
            raise ValueError(f"cache_batch_idx has {item}; k_cache has {there}")


def assert_room(seqused: Tensor, n: int | Tensor, capacity: int) -> None:
    """Room for n keys, of all items, or (batch,) of each, in a program that is compiled for the CPU."""
    if is_read_later(seqused):
        assert_async(
            ((seqused >= 0) & (seqused.long() + n <= capacity)).all(),
            "cache_seqlens has a count below 0, or one behind which the cache has no room for what k and v "
            "append: make the cache larger, or pass a table with more pages",
        )


def check_room(seqused: Tensor, n_new: int, capacity: int) -> None:
    """Where counts can be read (``is_readable``); those of a CUDA device must not be waited for."""
    assert_room(seqused, n_new, capacity)
    if not is_readable(seqused) or not seqused.numel():
        return
    longest = int(seqused.max())
    if longest + n_new > capacity:
        raise ValueError(
            f"cache_seqlens has {longest}, and k and v append {n_new}: the cache holds {capacity} tokens an "
            "item; make it larger, or pass a block_table with more pages"
        )


def check_one_owner(pages: Tensor, rows: Tensor) -> None:
    """Places that are written, (batch, seq_len_new): none twice, as far as ``check_room`` can see it."""
    if not is_readable(pages):
        return
    places = torch.stack((pages, rows), -1).flatten(0, 1)
    kinds, counts = places.unique(dim=0, return_counts=True)
    shared = kinds[counts > 1]
    if len(shared):
        page, row = shared[0].tolist()
        raise ValueError(
            f"block_table has page {page} for two batch items that both append to its row {row}: give each "
            "item a page of its own for what it appends"
        )


def check_positions(seqused: Tensor, n: int | Tensor, cos: Tensor) -> None:
    """Rotary rows for n positions behind each count, as far as ``check_room`` can see it.

    Args:
        n: of all items, or (batch,) of each.
    """
    if is_read_later(seqused):
        assert_async(
            ((seqused >= 0) & (seqused <= cos.shape[0] - n)).all(),
            "rotary_cos and rotary_sin have fewer rows than there are positions to turn: give more rows",
        )
    if not is_readable(seqused) or not seqused.numel():
        return
    last = int((seqused + n).max())
    if last > cos.shape[0]:
        raise ValueError(
            f"rotary_cos and rotary_sin have {cos.shape[0]} rows, and positions up to {last - 1} are turned: "
            f"give at least {last}"
        )
