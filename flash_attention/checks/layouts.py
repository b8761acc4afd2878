"""Checks of the tensors of a layout: packed sequences, caches, pages. Those that read a tensor say so."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attention.checks.options import given
from flash_attention.checks.tensors import check_tensors


def check_offsets(name: str, offsets: Tensor, q: Tensor) -> None:
    """What is known of cumulative lengths without reading them."""
    check_tensors({name: offsets})
    if offsets.ndim != 1 or not offsets.numel():
        raise ValueError(
            f"{name} has shape {tuple(offsets.shape)}; it must be (batch + 1,): 0, then each sequence's end"
        )
    check_int32_row(name, offsets, q.device)


def check_int32_row(name: str, row: Tensor, device: torch.device) -> None:
    """Numbers that a kernel reads: int32, on the device of q, one behind the other."""
    if row.dtype is not torch.int32:
        raise TypeError(f"{name} is {row.dtype}; it must be torch.int32: use {name}.int()")
    if row.device != device:
        raise ValueError(f"{name} is on {row.device}, q on {device}: move it with .to(q.device)")
    if not row.is_contiguous():
        raise ValueError(f"{name} has stride {row.stride(0)}; it must be 1: pass {name}.contiguous()")


def check_seqused(name: str, seqused: Tensor, q: Tensor) -> None:
    """How many keys of each batch item there are: (batch,) int32 on the device of q, contiguous."""
    check_counts_row(name, seqused, q.shape[0], q.device)


def check_counts_row(name: str, counts: Tensor, batch: int, device: torch.device) -> None:
    """A count for each of ``batch`` items: int32 on the device of q, contiguous."""
    check_tensors({name: counts})
    if tuple(counts.shape) != (batch,):
        raise ValueError(
            f"{name} has shape {tuple(counts.shape)}; it must be ({batch},): a count a batch item"
        )
    check_int32_row(name, counts, device)


def check_counts(name: str, seqused: Tensor, of: str = "keys") -> None:
    """Reads how many keys there are, which on a GPU waits for it. ValueError: less than none."""
    if seqused.numel() and (fewest := int(seqused.min())) < 0:
        raise ValueError(f"{name} has {fewest}; a count of {of} is at least 0")


def check_block_table(block_table: Tensor, q: Tensor, batch: int | None = None) -> None:
    """The pages of each batch item: (batch, max_pages) int32 on the device of q.

    Args:
        batch: batch items; None: the first size of q.
    """
    batch = q.shape[0] if batch is None else batch
    check_tensors({"block_table": block_table})
    if block_table.dtype is not torch.int32:
        raise TypeError(f"block_table is {block_table.dtype}; it must be torch.int32: use block_table.int()")
    if block_table.ndim != 2 or block_table.shape[0] != batch:
        raise ValueError(
            f"block_table has shape {tuple(block_table.shape)}; it must be ({batch}, max_pages): a row "
            "a batch item"
        )
    if block_table.device != q.device:
        raise ValueError(f"block_table is on {block_table.device}, q on {q.device}: use .to(q.device)")


def check_pages(
    block_table: Tensor,
    counts: Tensor,
    k: Tensor,
    rows: Tensor | None = None,
    begins: Tensor | None = None,
    names: str = "k and v",
) -> None:
    """Reads the pages that hold a key, which on a GPU waits for them.

    Args:
        block_table: (rows, max_pages).
        counts: (batch,), where the keys of each batch item end.
        k: (n_pages, page_size, n_heads_kv, d_head).
        rows: (batch,), the row of the table for each batch item; None: the first ones.
        begins: (batch,), where they begin; None: at 0.
        names: of the tensors that have the pages, for the message.

    Raises:
        ValueError: there is no such page.
    """
    table = block_table if rows is None else block_table[rows.long()]
    n_pages = k.shape[0]
    wrong = (pages_with_keys(table, counts, k, begins) & ((table < 0) | (table >= n_pages))).nonzero()
    if len(wrong):
        item, place = wrong[0].tolist()
        row = item if rows is None else int(rows[item])
        there = f"the pages 0 to {n_pages - 1}: name one of these" if n_pages else "no page: pass some"
        raise ValueError(
            f"block_table[{row}, {place}] is {int(table[item, place])}, and that page holds keys of "
            f"the item; {names} have {there}, or count fewer keys"
        )


def pages_with_keys(table: Tensor, counts: Tensor, k: Tensor, begins: Tensor | None = None) -> Tensor:
    """Which entries of a table (batch, max_pages) name a page that holds a key. Arguments as above."""
    page_size = k.shape[1]
    firsts = torch.arange(table.shape[1], device=table.device) * page_size  # the first key of each page
    used = firsts < counts[:, None]
    return used if begins is None else used & (firsts + page_size > begins[:, None])


def check_packing(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> None:
    """All that is known of packed sequences without reading the offsets."""
    check_offsets("cu_seqlens_q", cu_seqlens_q, q)
    check_offsets("cu_seqlens_k", cu_seqlens_k, q)
    check_max_seqlen("max_seqlen_q", max_seqlen_q)
    check_max_seqlen("max_seqlen_k", max_seqlen_k)
    if cu_seqlens_q.numel() != cu_seqlens_k.numel():
        raise ValueError(
            f"cu_seqlens_q has {cu_seqlens_q.numel()} entries, cu_seqlens_k {cu_seqlens_k.numel()}; both "
            "need batch + 1"
        )


def check_packed_cache(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:
    """All that is known of packed queries over a cache without reading a number of a tensor."""
    check_offsets("cu_seqlens_q", cu_seqlens_q, q)
    check_max_seqlen("max_seqlen_q", max_seqlen_q)
    check_max_seqlen("max_seqlen_k", max_seqlen_k)
    batch = cu_seqlens_q.numel() - 1
    if block_table is not None and cu_seqlens_k is not None:
        raise ValueError(
            "block_table and cu_seqlens_k are both given: keys are in pages, or packed; pass one of them"
        )
    if cu_seqlens_k is not None:
        check_packing(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    elif seqused_k is None:
        raise ValueError(
            "cu_seqlens_k is None, and so is seqused_k; nothing says how many keys a sequence has: pass "
            "seqused_k (batch,) for a cache or pages, or cu_seqlens_k (batch + 1,) for packed keys"
        )
    elif block_table is None and k.shape[0] != batch:
        raise ValueError(
            f"k and v have {k.shape[0]} sequences, cu_seqlens_q {batch}; without cu_seqlens_k and "
            "block_table they must be (batch, capacity, heads, d)"
        )
    for name, counts in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if counts is not None:
            check_counts_row(name, counts, batch, q.device)
    if block_table is not None:
        check_block_table(block_table, q, batch)


def check_packed_cache_values(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:
    """Reads offsets, counts and pages, which on a GPU waits for it. ValueError: what is wrong with them."""
    check_offset_values("cu_seqlens_q", cu_seqlens_q, q.shape[0], "max_seqlen_q", max_seqlen_q)
    if cu_seqlens_k is not None:
        check_offset_values("cu_seqlens_k", cu_seqlens_k, k.shape[0], "max_seqlen_k", max_seqlen_k)
    for name, counts, of in (("seqused_q", seqused_q, "queries"), ("seqused_k", seqused_k, "keys")):
        if counts is not None:
            check_counts(name, counts, of)
    if seqused_k is not None and cu_seqlens_k is None:
        room = k.shape[1] if block_table is None else block_table.shape[1] * k.shape[1]
        most = min(int(seqused_k.max()), room) if seqused_k.numel() else 0
        if most > max_seqlen_k:
            raise ValueError(
                f"seqused_k has {most}; max_seqlen_k is {max_seqlen_k}, and it is the most keys of one "
                f"sequence: pass at least {most}"
            )
    if block_table is not None:
        assert seqused_k is not None
        check_pages(block_table, seqused_k, k)


def check_max_seqlen(name: str, value: int) -> None:
    """A host number, since a launch needs it. That of a tracer is known when the call runs."""
    if isinstance(value, torch.SymInt) or (torch.compiler.is_compiling() and type(value) is int):
        return  # what is read from a tensor there can't be compared; the operator asks again
    if type(value) is not int or value < 0:
        error = ValueError if type(value) is int else TypeError
        raise error(
            f"{name} is {given(value)}; it must be an int, at least 0: the length of the longest sequence"
        )


def check_offset_values(
    name: str, offsets: Tensor, total: int, max_seqlen_name: str, max_seqlen: int
) -> None:
    """Reads cumulative lengths, which on a GPU waits for them.

    Raises:
        ValueError: they do not start at 0, decrease, end beyond ``total``, or pass the longest length.
    """
    offsets = offsets.long()  # differences of 32-bit numbers need 33
    lengths = offsets.diff()
    first, last = offsets[0], offsets[-1]
    shortest = lengths.min() if lengths.numel() else first.new_zeros(())
    longest = lengths.max() if lengths.numel() else first.new_zeros(())
    first, last, shortest, longest = torch.stack((first, last, shortest, longest)).tolist()
    if first != 0:
        raise ValueError(f"{name} starts with {first}; it must start with 0")
    if shortest < 0:
        raise ValueError(
            f"{name} decreases by {-shortest} somewhere; each entry must be at least the one before"
        )
    if last > total:
        raise ValueError(
            f"{name} ends with {last}; it must end at or before the number of packed rows, {total}"
        )
    if longest > max_seqlen:
        raise ValueError(
            f"the longest sequence by {name} has {longest} rows; {max_seqlen_name} is {max_seqlen}: pass at "
            f"least {longest}"
        )
