"""The parts of a call that the CPU backend computes one after the other: each is dense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from flash_attention.backends.without_keys import fill_without_keys
from flash_attention.call import Call
from flash_attention.layouts import Cached, Packed, PackedCached


class Item(NamedTuple):
    """Batch items of one length: q, k, v and out are (batch, seq, heads, d), lse is (batch, heads, seq).

    ``first`` is the place of the first of them in the call: of packed sequences, the number of the sequence.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None
    first: int = 0


def items_of(call: Call) -> Iterator[Item]:
    """A dense call in one; each packed sequence; each item of a cache. Rows of no sequence are filled."""
    if isinstance(call.layout, Packed):
        yield from _sequences(call, call.layout)
    elif isinstance(call.layout, Cached):
        yield from _cached(call, call.layout)
    elif isinstance(call.layout, PackedCached):
        yield from _packed_cached(call, call.layout)
    else:
        yield Item(call.q, call.k, call.v, call.out, call.lse)


def _sequences(call: Call, layout: Packed) -> Iterator[Item]:
    ends_q, ends_k = layout.cu_seqlens_q.tolist(), layout.cu_seqlens_k.tolist()
    for i in range(len(ends_q) - 1):
        queries, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        lse = None if call.lse is None else call.lse[None, :, queries]
        yield Item(
            call.q[None, queries], call.k[None, keys], call.v[None, keys], call.out[None, queries], lse, i
        )
    padding = slice(ends_q[-1], None)
    fill_without_keys(call.out[padding], None if call.lse is None else call.lse[:, padding], None)


def _cached(call: Call, layout: Cached) -> Iterator[Item]:
    for i, n in enumerate(layout.seqused_k.clamp(0, call.problem.seq_len_k).tolist()):
        one = slice(i, i + 1)
        k, v = (_first_rows(x, i, n, layout.block_table) for x in (call.k, call.v))
        lse = None if call.lse is None else call.lse[one]
        yield Item(call.q[one], k, v, call.out[one], lse, i)


def _packed_cached(call: Call, layout: PackedCached) -> Iterator[Item]:
    ends = layout.cu_seqlens_q.tolist()
    fill_without_keys(call.out, call.lse, None)  # rows that do not count, too
    for i in range(len(ends) - 1):
        used = ends[i + 1] - ends[i]
        if layout.seqused_q is not None:
            used = min(used, int(layout.seqused_q[i]))
        queries = slice(ends[i], ends[i] + used)
        k, v = (_keys_of(x, i, layout) for x in (call.k, call.v))
        lse = None if call.lse is None else call.lse[None, :, queries]
        yield Item(call.q[None, queries], k, v, call.out[None, queries], lse, i)


def _keys_of(x: Tensor, item: int, layout: PackedCached) -> Tensor:
    """The keys or values of a sequence that count, (1, n, heads, d)."""
    n = layout.capacity(x) if layout.seqused_k is None else int(layout.seqused_k[item])
    if layout.cu_seqlens_k is None:
        return _first_rows(x, item, min(n, layout.capacity(x)), layout.block_table)
    begin, end = layout.cu_seqlens_k[item : item + 2].tolist()
    return x[None, begin : min(end, begin + n)]


def _first_rows(cache: Tensor, item: int, n: int, block_table: Tensor | None) -> Tensor:
    """The first n rows of a batch item, (1, n, heads, d)."""
    if block_table is None:
        return cache[item : item + 1, :n]
    pages = block_table[item, : -(-n // cache.shape[1])].long()
    return cache[pages].flatten(0, 1)[None, :n]
