"""A call on a cache of keys and values: rotate, append in place, find the pages, attend.

Nothing is written before every tensor was checked as the caller gave it (``compat/kv_cache_checks.py``). On a
CUDA device no length is read on the host. Appending one token takes 5 small launches of PyTorch's, in pages
8; a CUDA graph replays them without any host time. Flat indices into the cache would save one or two, but a
place beyond an item's cache would then be another item's, where now it is an error: on the CPU before
anything is written, on a CUDA device by PyTorch's assertion there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attention.cached import attention_cached
from flash_attention.checks.layouts import check_counts, check_counts_row
from flash_attention.checks.options import checked_flag, given
from flash_attention.checks.tensors import check_tensors
from flash_attention.compat import kv_cache_checks as checks
from flash_attention.compat.alibi import alibi, checked_slopes, is_ordered
from flash_attention.compat.padding import Result, cut, padded
from flash_attention.compat.places import counted, in_caches
from flash_attention.run.tracing import is_readable

MAX_INT64 = 2**63 - 1
MAX_INT32 = 2**31 - 1


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
    alibi_slopes: Tensor | None = None,
    options: dict[str, Any],
) -> Result:
    """See ``flash_attn_interface.flash_attn_with_kvcache``.

    Args:
        rotary: cosines and sines.
        options: keywords of ``attention``.
    """
    cos, sin = (None, None) if rotary is None else rotary
    tensors = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx, "block_table": block_table, "rotary_cos": cos, "rotary_sin": sin,
    }  # fmt: skip
    checks.check_tensor_kinds(tensors)
    rotary_interleaved = checked_flag("rotary_interleaved", rotary_interleaved)
    batch = q.shape[0]
    checks.check_cache(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, block_table)
    shared = cache_batch_idx is not None or block_table is not None
    if not shared and k_cache.shape[0] > batch:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]  # a cache may have room for more items
    checks.check_call(q, k_cache, v_cache, shared, options)
    if rotary is not None:
        checks.check_rotary(cos, sin, q, k)
    if alibi_slopes is not None:
        alibi_slopes = checked_slopes(alibi_slopes, q, batch)
    page_size = k_cache.shape[1]
    capacity = page_size if block_table is None else block_table.shape[1] * page_size
    checks.check_items(cache_batch_idx, k_cache, appended=k is not None)
    seqused = counts_of(cache_seqlens, capacity, batch, q.device)
    if k is not None and v is not None:
        n_new = k.shape[1]
        checks.check_room(seqused, n_new, capacity)
        checks.check_apart({**tensors, "k_cache": k_cache, "v_cache": v_cache})
        places = from_the_start(seqused)[:, None]  # (batch, 1)
        if n_new != 1:
            places = places + torch.arange(n_new, device=q.device)  # (batch, n_new)
        if cos is not None and sin is not None:
            ordered = options["causal"] or options["window"] != (None, None)
            checks.check_positions(seqused, max(n_new, q.shape[1] if ordered else 1), cos)
            own = torch.arange(q.shape[1], device=q.device) if ordered else q.new_zeros(q.shape[1]).long()
            q = rotated(q, cos, sin, from_the_start(seqused)[:, None] + own, rotary_interleaved)
            k = rotated(k, cos, sin, places, rotary_interleaved)
        checks.check_pages_of(block_table, seqused + n_new, k_cache)
        if block_table is None:
            items = (
                torch.arange(batch, device=q.device)
                if cache_batch_idx is None
                else from_the_start(cache_batch_idx)
            )
            index = (items[:, None], places)
        else:
            pages = from_the_start(block_table.gather(1, places // page_size))
            index = (pages, places % page_size)
            checks.check_one_owner(*index)
        k_cache.index_put_(index, k)
        v_cache.index_put_(index, v)
        seqused = seqused + n_new
    if cache_batch_idx is not None:
        if cache_batch_idx.dtype is torch.int64:  # one that no cache has must not become one that it has
            cache_batch_idx = cache_batch_idx.clamp(-1, MAX_INT32)
        block_table = cache_batch_idx.int()[:, None]  # each item's cache is one page
    if alibi_slopes is not None:
        place = in_caches(counted(seqused, capacity), q.shape[1])
        options = {**options, "score_mod": alibi(alibi_slopes, place, is_ordered(options))}
    out = attention_cached(
        padded(q), padded(k_cache), padded(v_cache), seqused, block_table=block_table, **options
    )
    return cut(out, v_cache)


def from_the_start(index: Tensor) -> Tensor:
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
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first].float(), x[..., second].float()
    turned = x.clone()  # written into, since under autocast torch.cat refuses the other 16-bit type
    turned[..., first] = a * c - b * s
    turned[..., second] = a * s + b * c
    return turned


def counts_of(cache_seqlens: int | Tensor | None, capacity: int, batch: int, device: torch.device) -> Tensor:
    """Keys in the cache, (batch,) int32 on the device of q."""
    if isinstance(cache_seqlens, Tensor):
        check_tensors({"cache_seqlens": cache_seqlens})
        counts = cache_seqlens.contiguous()
        check_counts_row("cache_seqlens", counts, batch, device)
        if is_readable(counts):
            check_counts("cache_seqlens", counts)
        return counts
    count = capacity if cache_seqlens is None else cache_seqlens
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**31:
        raise TypeError(
            f"cache_seqlens is {given(count)}; it must be an int32 tensor of shape ({batch},) on "
            f"{device}, or one int, from 0 to 2^31 - 1, for all batch items"
        )
    return torch.full((batch,), count, dtype=torch.int32, device=device)
