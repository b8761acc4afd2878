"""A call on a cache of keys and values: rotate, append in place, find the pages, attend.

On a CUDA device no length is read on the host. Appending one token takes 5 small launches of PyTorch's, in
pages 8; a CUDA graph replays them without any host time. Flat indices into the cache would save one or two,
but a place beyond an item's cache would then be another item's, where now it is an error: on the CPU before
anything is written, on a CUDA device by PyTorch's assertion there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attention.backends import DEVICE_TYPES
from flash_attention.cached import attention_cached
from flash_attention.checks.calls import (
    check_block_table,
    check_inputs,
    check_pages,
    check_seqused,
)
from flash_attention.checks.memory import overlap, overlaps_itself
from flash_attention.checks.options import checked_flag, checked_scale, given
from flash_attention.checks.tensors import check_tensors
from flash_attention.options import Options
from flash_attention.run.choices import LAYOUT
from flash_attention.run.eager import Result
from flash_attention.run.tracing import is_readable, not_for_eager, wants_autocast

PAGE_MULTIPLE = 16  # tokens
MAX_INT64 = 2**63 - 1


def attend_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    rotary: tuple[Tensor | None, Tensor | None] | None,
    rotary_interleaved: bool,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
    options: dict[str, Any],
) -> Result:
    """See ``flash_attn_interface.flash_attn_with_kvcache``.

    Args:
        rotary: cosines and sines.
        options: keywords of ``attention``.
    """
    _check_tensors(q, k_cache, v_cache, k, v, cache_batch_idx)
    rotary_interleaved = checked_flag("rotary_interleaved", rotary_interleaved)
    batch = q.shape[0]
    _check_cache(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, block_table)
    if rotary is not None and k is None:
        raise ValueError("rotary_cos and rotary_sin are given without k and v: rotate q before the call")
    page_size = k_cache.shape[1]
    capacity = page_size if block_table is None else block_table.shape[1] * page_size
    if block_table is None and cache_batch_idx is None and k_cache.shape[0] > batch:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]  # a cache may have room for more items
    _check_items(cache_batch_idx, k_cache, appended=k is not None)
    seqused = _counts(cache_seqlens, capacity, q)
    if k is not None and v is not None:
        n_new = k.shape[1]
        _check_room(seqused, n_new, capacity)
        _check_apart(k_cache, v_cache)
        places = _from_the_start(seqused)[:, None]  # (batch, 1)
        if n_new != 1:
            places = places + torch.arange(n_new, device=q.device)  # (batch, n_new)
        if rotary is not None:
            cos, sin = _checked_rotary(rotary, q)
            ordered = options["causal"] or options["window"] != (None, None)
            _check_positions(seqused, max(n_new, q.shape[1] if ordered else 1), cos)
            own = torch.arange(q.shape[1], device=q.device) if ordered else q.new_zeros(q.shape[1]).long()
            q = rotated(q, cos, sin, seqused[:, None].long() + own, rotary_interleaved)
            k = rotated(k, cos, sin, places, rotary_interleaved)
        _check_call(q, k_cache, v_cache, seqused + n_new, cache_batch_idx, block_table, options)
        if block_table is None:
            items = (
                torch.arange(batch, device=q.device)
                if cache_batch_idx is None
                else _from_the_start(cache_batch_idx)
            )
            index = (items[:, None], places)
        else:
            pages = _from_the_start(block_table.gather(1, places // page_size))
            index = (pages, places % page_size)
            _check_one_owner(*index)
        k_cache.index_put_(index, k)
        v_cache.index_put_(index, v)
        seqused = seqused + n_new
    if cache_batch_idx is not None:
        block_table = cache_batch_idx.int()[:, None]  # each item's cache is one page
    return attention_cached(q, k_cache, v_cache, seqused, block_table=block_table, **options)


def _from_the_start(index: Tensor) -> Tensor:
    """int32 or int64 as int64. A negative one becomes too large for any cache, else it would count from the
    end, and what is there be overwritten."""
    return index.view(torch.uint32).long() if index.dtype is torch.int32 else index & MAX_INT64


def rotated(x: Tensor, cos: Tensor, sin: Tensor, places: Tensor, interleaved: bool) -> Tensor:
    """Rotary position embedding, computed in float32 and rounded once.

    Args:
        x: (batch, seq, heads, d); the first d_rotary columns turn.
        cos: (seq_len_rotary, d_rotary / 2).
        sin: like cos.
        places: (batch, seq) int64, the row of cos for each row of x.
        interleaved: pairs are columns (2i, 2i + 1); else (i, i + d_rotary / 2).
    """
    c, s = (table[places][:, :, None].float() for table in (cos, sin))  # (batch, seq, 1, d_rotary / 2)
    half = cos.shape[1]
    turning = x[..., : 2 * half].float()
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)
    else:
        a, b = turning[..., :half], turning[..., half:]
        turned = torch.cat((a * c - b * s, a * s + b * c), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), dim=-1)


def _counts(cache_seqlens: int | Tensor | None, capacity: int, q: Tensor) -> Tensor:
    """Keys in the cache, (batch,) int32 on the device of q."""
    if isinstance(cache_seqlens, Tensor):
        check_tensors({"cache_seqlens": cache_seqlens})
        cache_seqlens = cache_seqlens.contiguous()
        check_seqused("cache_seqlens", cache_seqlens, q)
        return cache_seqlens
    count = capacity if cache_seqlens is None else cache_seqlens
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**31:
        raise TypeError(
            f"cache_seqlens is {given(count)}; it must be an int32 tensor of shape ({q.shape[0]},) on "
            f"{q.device}, or one int, from 0 to 2^31 - 1, for all batch items"
        )
    return torch.full((q.shape[0],), count, dtype=torch.int32, device=q.device)


def _check_room(seqused: Tensor, n_new: int, capacity: int) -> None:
    """Where counts can be read (``is_readable``); those of a CUDA device must not be waited for."""
    if not is_readable(seqused) or not seqused.numel():
        return
    shortest, longest = int(seqused.min()), int(seqused.max())
    if shortest < 0:
        raise ValueError(f"cache_seqlens has {shortest}; a count of keys is at least 0")
    if longest + n_new > capacity:
        raise ValueError(
            f"cache_seqlens has {longest}, and k and v append {n_new}: the cache holds {capacity} tokens an "
            "item; make it larger, or pass a block_table with more pages"
        )


def _check_apart(k_cache: Tensor, v_cache: Tensor) -> None:
    """Caches that are written: no place of theirs may stand for two."""
    if torch.compiler.is_compiling() or not_for_eager(k_cache, k_cache, v_cache):
        return
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if overlaps_itself(cache):
            raise ValueError(
                f"elements of {name} share memory (shape {tuple(cache.shape)}, strides {cache.stride()}), "
                f"and k and v are appended: pass {name}.contiguous(), and keep it"
            )
    if overlap(k_cache, v_cache):
        raise ValueError(
            "k_cache and v_cache overlap in memory, and k and v are appended: each needs memory of its own"
        )


def _check_items(cache_batch_idx: Tensor | None, k_cache: Tensor, appended: bool) -> None:
    """Items that the cache has, each once if it is written, as far as ``_check_room`` can see it."""
    if cache_batch_idx is None or not is_readable(cache_batch_idx):
        return
    for item in cache_batch_idx.tolist():
        if not 0 <= item < k_cache.shape[0]:
            there = f"the items 0 to {k_cache.shape[0] - 1}" if k_cache.shape[0] else "no item"
            raise ValueError(f"cache_batch_idx has {item}; k_cache has {there}")
    if appended and cache_batch_idx.unique().numel() < cache_batch_idx.numel():
        raise ValueError(
            f"cache_batch_idx is {cache_batch_idx.tolist()}, and k and v are appended: name no item twice"
        )


def _check_one_owner(pages: Tensor, rows: Tensor) -> None:
    """Places that are written, (batch, seq_len_new): none twice, as far as ``_check_room`` can see it."""
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


def _check_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    counts: Tensor,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
    options: dict[str, Any],
) -> None:
    """What ``attention_cached`` would refuse once the cache has changed; pages are read on the CPU alone."""
    if torch.compiler.is_compiling() or wants_autocast(q, k_cache, v_cache):
        return
    Options(**options).checked(q)
    checked_scale(options["softmax_scale"], q.shape[3])
    shared = cache_batch_idx is not None or block_table is not None
    check_inputs(q, k_cache, v_cache, None, LAYOUT, shared, ("meta",) if q.is_meta else DEVICE_TYPES)
    if block_table is not None and is_readable(block_table):
        check_pages(block_table, counts, k_cache)


def _check_tensors(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_batch_idx: Tensor | None,
) -> None:
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    optional = {"k": k, "v": v, "cache_batch_idx": cache_batch_idx}
    check_tensors(tensors | {name: x for name, x in optional.items() if x is not None})
    if q.ndim != 4:
        raise ValueError(f"q has shape {tuple(q.shape)}; it must be (batch, seq_len_q, n_heads, d_head)")


def _check_cache(
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
    if k_cache.ndim != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"k_cache and v_cache must be (batch or pages, tokens, n_heads_kv, d) and agree; given "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if block_table is None and cache_batch_idx is None and k_cache.shape[0] < batch:
        raise ValueError(
            f"q has {batch} batch items, k_cache and v_cache {k_cache.shape[0]}; they need at least as many: "
            "pass larger ones, or cache_batch_idx, the cache's item for each of q's"
        )
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together: both are appended to the cache, or neither")
    if k is not None and v is not None:
        if cache_seqlens is None:
            raise ValueError("k and v are given without cache_seqlens: it says where they are appended")
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
    if cache_batch_idx is not None:
        raise ValueError(
            "cache_batch_idx and block_table exclude each other: reorder the rows of block_table"
        )
    check_block_table(block_table, q)
    if k_cache.shape[1] % PAGE_MULTIPLE:
        raise ValueError(
            f"pages have {k_cache.shape[1]} tokens (k_cache's second dimension); with block_table it must be "
            f"a multiple of {PAGE_MULTIPLE}"
        )


def _check_positions(seqused: Tensor, n: int, cos: Tensor) -> None:
    """Rotary rows for n positions behind each count, as far as ``_check_room`` can see it."""
    if not is_readable(seqused) or not seqused.numel():
        return
    last = int(seqused.max()) + n
    if last > cos.shape[0]:
        raise ValueError(
            f"rotary_cos and rotary_sin have {cos.shape[0]} rows, and positions up to {last - 1} are turned: "
            f"give at least {last}"
        )


def _checked_rotary(rotary: tuple[Tensor | None, Tensor | None], q: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rotary
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin must be given together")
    check_tensors({"rotary_cos": cos, "rotary_sin": sin})
    if not cos.device == sin.device == q.device:
        raise ValueError(
            f"rotary_cos is on {cos.device}, rotary_sin on {sin.device}, q on {q.device}: move them with "
            ".to(q.device)"
        )
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[3]:
        raise ValueError(
            f"rotary_cos has shape {tuple(cos.shape)}, rotary_sin {tuple(sin.shape)}; both must be "
            f"(seq_len_rotary, d_rotary / 2) with d_rotary at most the head size {q.shape[3]}"
        )
    return cos, sin
