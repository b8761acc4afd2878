"""A call on a cache with everything that flash-attn 3 can say of it: append, rotate, then attend.

Queries, and what is appended, are packed, or batches that become packed ones by their shape alone. A cache
whose keys begin behind padding, or that is read through ``cache_batch_idx``, becomes pages: pages of one row
where keys are padded on the left. Another in one piece stays so. Everything is computed on the device, so
that a CUDA graph of a call serves all lengths. What is written was checked before, as the caller gave it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attention.attention import attention_varlen
from flash_attention.compat import kv_cache_checks as checks
from flash_attention.compat.alibi import alibi, checked_slopes, is_ordered
from flash_attention.compat.kv_cache import MAX_INT32, counts_of, from_the_start, rotated
from flash_attention.compat.packed_cache_checks import (
    check_nothing_new,
    check_packed_call,
    check_padding,
    check_room,
)
from flash_attention.compat.padding import Result, cut, padded
from flash_attention.compat.places import counted, in_items
from flash_attention.compat.within_chunks import within_chunks
from flash_attention.run.choices import explain_choice
from flash_attention.run.tracing import is_readable, not_for_eager, traced


class Rotary(NamedTuple):
    """Rotary embedding of queries and of what is appended.

    Attributes:
        cos, sin: (seq_len_rotary, d_rotary / 2).
        interleaved: neighbouring columns turn together.
        begins: (batch,) the position of each item's first query; None: ``cache_seqlens``.
    """

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    begins: Tensor | None = None


class Rows(NamedTuple):
    """Rows of several sequences, one behind the other.

    Attributes:
        ends: (batch + 1,) int32, 0 and the end of each.
        longest: the most of one.
        sequence: (total,) int64, whose each row is; of rows behind the last end any.
        place: (total,) int64, where in it.
        exists: (total,) bool, whether it is before the last end.
    """

    ends: Tensor
    longest: int
    sequence: Tensor
    place: Tensor
    exists: Tensor

    @classmethod
    def of(cls, ends: Tensor, longest: int, total: int) -> Rows:
        """The rows that these offsets say, of a tensor with ``total``."""
        index = torch.arange(total, device=ends.device, dtype=torch.int32)
        sequence = torch.searchsorted(ends[1:].contiguous(), index, right=True)
        sequence = sequence.clamp(max=max(ends.numel() - 2, 0))
        begins = ends[sequence] if ends.numel() > 1 else index
        return cls(ends, longest, sequence, (index - begins).long(), index < ends[-1])


def equal_ends(batch: int, length: int, device: torch.device) -> Tensor:
    """Offsets of sequences of one length."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def attend_packed_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    rotary: Rotary | None = None,
    attention_chunk: int = 0,
    alibi_slopes: Tensor | None = None,
    n_splits: int | None = None,
    options: dict[str, Any],
) -> Result:
    """See ``flash_attn_3.flash_attn_with_kvcache``.

    Args:
        options: keywords of ``attention``.
    """
    batched = cu_seqlens_q is None
    cos, sin, interleaved, positions = rotary or Rotary(None, None, True)
    tensors = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k_new": cu_seqlens_k_new, "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad, "block_table": block_table,
        "rotary_cos": cos, "rotary_sin": sin, "rotary_seqlens": positions,
    }  # fmt: skip
    check_packed_call(tensors, max_seqlen_q, options)
    if alibi_slopes is not None:
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
        alibi_slopes = checked_slopes(alibi_slopes, q, batch)
    if cu_seqlens_q is None:
        batch, longest, rows = q.shape[0], q.shape[1], q.flatten(0, 1)
        cu_seqlens_q = equal_ends(batch, longest, q.device)
    else:
        batch, rows = cu_seqlens_q.numel() - 1, q
        longest = int(max_seqlen_q or 0)
    items = None if cache_batch_idx is None else from_the_start(cache_batch_idx)
    table = block_table
    if table is not None:
        table = table if items is None else table[items]
    elif items is None:  # the cache of an item is one page
        table = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    else:
        table, items = items.clamp(max=MAX_INT32).int()[:, None], None
    page_size = k_cache.shape[1]
    capacity = page_size * table.shape[1]
    before = counts_of(cache_seqlens, capacity, batch, q.device)
    check_padding(cache_leftpad, before)
    queries = Rows.of(cu_seqlens_q, longest, rows.shape[0])
    counts = before
    if k is not None and v is not None:
        if cu_seqlens_k_new is None:
            cu_seqlens_k_new = equal_ends(batch, k.shape[1], q.device)
            new = Rows.of(cu_seqlens_k_new, k.shape[1], batch * k.shape[1])
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        else:
            new = Rows.of(cu_seqlens_k_new, k.shape[0], k.shape[0])
        added = cu_seqlens_k_new.diff()
        check_room(before, added, capacity)
        counts = before + added
    checks.check_pages_of(block_table, counts, k_cache, items, cache_leftpad)
    kept = counts
    if cache_leftpad is not None:  # the table of its rows has none behind the last one
        kept = (counted(counts, capacity) - cache_leftpad).clamp(min=0)
    if attention_chunk or alibi_slopes is not None:
        place = in_items(counted(kept, capacity), cu_seqlens_q.diff())
        if attention_chunk:
            options = {**options, "mask_mod": within_chunks(attention_chunk, place)}
        if alibi_slopes is not None:
            options = {**options, "score_mod": alibi(alibi_slopes, place, is_ordered(options))}
    caches = k_cache, v_cache  # or views of them, so that they have what is appended
    pages: Tensor | None = table
    if cache_leftpad is not None and capacity:
        caches, pages = _rows_as_pages(caches, table, page_size, cache_leftpad, capacity)
    elif block_table is cache_batch_idx is None:  # as it is, since kernels may not take pages of its capacity
        caches, pages = (k_cache[:batch], v_cache[:batch]), None
    options = {**options, "seqused_k": kept, "block_table": pages, "n_splits": n_splits}
    if k is not None and v is not None and batch:  # else all rows of q, k and v are padding
        if "mask_mod" in options or "score_mod" in options:
            _refuse_before_writing(rows, caches, cu_seqlens_q, longest, capacity, options)
        if cos is not None and sin is not None:
            ordered = bool(options["causal"] or options["window"] != (None, None) or attention_chunk)
            begins = from_the_start(before if positions is None else positions)
            asked = cu_seqlens_q.diff() if ordered else cu_seqlens_q.diff().clamp(max=1)
            checks.check_positions(begins, torch.maximum(counts - before, asked), cos)

            def turned(x: Tensor, at: Rows, moves: bool) -> Tensor:
                place = begins[at.sequence] + (at.place if moves else 0)
                place = torch.where(at.exists, place, 0)  # rows of no sequence may stand anywhere
                return rotated(x[None], cos, sin, place[None], interleaved)[0]

            rows, k = turned(rows, queries, ordered), turned(k, new, True)
        _append((k_cache, v_cache), (k, v), new, before, table, page_size)
    out = attention_varlen(
        padded(rows), padded(caches[0]), padded(caches[1]), cu_seqlens_q, None, longest, capacity, **options
    )
    out = cut(out, v_cache)
    return _in_batches(out, batch, q.shape[1]) if batched else out


def _refuse_before_writing(
    rows: Tensor,
    caches: tuple[Tensor, Tensor],
    cu_seqlens_q: Tensor,
    longest: int,
    capacity: int,
    options: dict[str, Any],
) -> None:
    """Asks for the kernel of a call with functions. GPUs have none: then the caches stay as they are."""
    if traced() or not_for_eager(rows, *caches, cu_seqlens_q):
        return
    explain_choice(
        padded(rows), padded(caches[0]), padded(caches[1]),
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=longest, max_seqlen_k=capacity, **options,
    )  # fmt: skip


def _append(
    caches: tuple[Tensor, Tensor],
    new_rows: tuple[Tensor, Tensor],
    new: Rows,
    before: Tensor,
    table: Tensor,
    page_size: int,
) -> None:
    """Writes packed rows behind the keys that are there. Rows behind the last offset write what the first
    row writes, or, where there is none, what is there."""
    n = len(new.place)
    if not n:
        return
    if not caches[0].numel():
        check_nothing_new(new.ends)
        return
    source = torch.where(new.exists, torch.arange(n, device=before.device), 0)
    place = from_the_start(before)[new.sequence] + new.place
    place, sequence = place[source], new.sequence[source]
    some = new.ends[-1] > 0
    page = from_the_start(table[sequence, torch.where(some, place // page_size, 0)])
    index = torch.where(some, page, 0), torch.where(some, place % page_size, 0)
    if is_readable(page):
        checks.check_one_owner(*(x[new.exists][:, None] for x in index))
    for cache, rows in zip(caches, new_rows, strict=True):
        cache.index_put_(index, torch.where(some, rows[source], cache[index]))


def _rows_as_pages(
    caches: tuple[Tensor, Tensor], table: Tensor, page_size: int, leftpad: Tensor, capacity: int
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Caches as pages of one row, and the table of the rows from each item's first key on."""
    place = leftpad.long()[:, None] + torch.arange(capacity, device=table.device)
    place = place.clamp(max=capacity - 1)
    page = table.long().gather(1, place // page_size)
    rows = page * page_size + place % page_size
    k, v = (x.view(-1, 1, *x.shape[2:]) for x in caches)
    return (k, v), rows.int()


def _in_batches(result: Result, batch: int, seq_len: int) -> Result:
    """A packed result of sequences of one length as a batch."""
    if not isinstance(result, tuple):
        return result.unflatten(0, (batch, seq_len))
    out, lse = result
    return out.unflatten(0, (batch, seq_len)), lse.unflatten(1, (batch, seq_len)).transpose(0, 1).contiguous()
