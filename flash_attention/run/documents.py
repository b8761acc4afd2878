"""Calls whose mask says of which document a place is, as calls on packed sequences.

Kernels of packed sequences begin their blocks where a document does, and look at no element of a mask. So a
mask ``T[q_idx] == T[kv_idx]``, within a band or not, becomes offsets where each value in T is one run of
places. They are read from T once, which waits for its device, and kept as long as nobody writes to T.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attention.backward_call import BackwardCall
from flash_attention.call import Call, Mask, Scores
from flash_attention.layouts import Dense, Layout, Packed
from flash_attention.mods.tracing import Traced
from flash_attention.options import Options
from flash_attention.torch_private import current_stream
from flash_helpers.mods.documents import DocumentForm, document_form
from flash_helpers.mods.plain_forms import Band

KEPT = 64  # tensors whose documents are kept
# What a mask's kernel and that of packed sequences cost, in tiles of a warpgroup: rows and columns of a tile
# and the cost of asking the mask of its elements, of head sizes up to 64 and of larger ones; the cost of a
# warpgroup's rows beside their tiles. Of times measured on an H200.
GROUP, SMALL_HEAD = 64, 64
SMALL_TILE, TILE, ITEM = (256, 64, 1.4), (128, 128, 0.5), 1.0
# Packed sequences run where a mask's kernel would take this part of their time or more. Backward kernels have
# smaller blocks, so that short documents cost them less.
LEAST, LEAST_WITH_GRADIENTS = 1.0, 0.5


class PackedForm(NamedTuple):
    """Inputs of a call as packed sequences, with what is left of its mask and scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scores: Scores
    layout: Packed


class _Documents(NamedTuple):
    """Where the documents of all batch items begin, and where the last one ends, among the rows of all.

    Attributes:
        offsets: int32, on the device.
        ends: the same, on the host.
        longest: rows of the longest document.
        owners: whose memory the tensors are that they were read from.
    """

    offsets: Tensor
    ends: Tensor
    longest: int
    owners: tuple[weakref.ref[Tensor], ...]


_kept: OrderedDict[Any, _Documents | None] = OrderedDict()


# ---------------------------------------------------------------------- calls
def packed_form(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores, layout: Layout, *, with_gradients: bool
) -> PackedForm | None:
    """What a call is on packed sequences; None: it stays as it is.

    Args:
        q, k, v, mask, scores, layout: of the call.
        with_gradients: it has a backward pass, or is one.
    """
    traced = scores.traced
    if traced is None or scores.sinks is not None or not isinstance(layout, Dense):
        return None
    if not (q.is_cuda and q.numel()):
        return None
    form = document_form(traced.mod, traced.numbers)
    if form is None or q.shape[1] != k.shape[1] or (rows := _rows(q, k, v)) is None:
        return None
    found = _documents(traced, form, q)
    if found is None:
        return None
    least = LEAST_WITH_GRADIENTS if with_gradients else LEAST
    if _time_of_mask(found, q.shape[1], q.shape[-1]) < least:
        return None
    low, high = form.band.within(Band(None if mask.left is None else -mask.left, mask.right))
    return PackedForm(
        rows[0],
        rows[1],
        rows[2],
        Mask(None if low is None else -low, high),
        scores._replace(traced=None),
        Packed(found.offsets, found.offsets, found.longest, found.longest),
    )


def is_packable(q: Tensor, out: Tensor | None, options: Options) -> bool:
    """Whether options and output let a call run on packed sequences.

    Args:
        q: its queries.
        out: its output; None: it is made.
        options: its options.
    """
    if options.dropout_p or options.numerics is not None or options.n_sms is not None:
        return False
    if options.config is not None or options.backward_config is not None:  # of kernels with the mask
        return False
    if options.out_dtype not in (None, q.dtype):
        return False
    if options.return_lse and q.shape[0] > 1:  # its rows lie as those of batch items
        return False
    return out is None or _rows(out) is not None


def as_packed(call: Call, options: Options, *, with_gradients: bool) -> tuple[Call, Call, Tensor] | None:
    """The call with the LSE that it writes, the call on packed sequences, and what its launch keeps; None: it
    stays as it is.

    Args:
        call: the call.
        options: its options.
        with_gradients: a backward pass will follow.
    """
    if not is_packable(call.q, call.out, options):
        return None
    form = packed_form(*call.parts, with_gradients=with_gradients)
    if form is None:
        return None
    lse = None
    if call.lse is not None:
        batch, seq_len, n_heads, _ = call.q.shape
        lse = call.lse.new_empty(n_heads, batch * seq_len)
        call = replace(call, lse=lse.view(n_heads, batch, seq_len).transpose(0, 1))
    return call, Call(*form[:3], call.out.flatten(0, 1), lse, *form[3:]), form.layout.cu_seqlens_q


def gradients_as_packed(call: BackwardCall, options: Options) -> tuple[BackwardCall, Tensor] | None:
    """The call on packed sequences, and what it keeps; None: it stays as it is, as where the forward pass
    did."""
    written = call.dq, call.dk, call.dv
    if not is_packable(call.q, None, options):
        return None
    if _rows(call.out, *(x for x in written if x is not None)) is None:
        return None
    form = packed_form(*call.parts, with_gradients=True)
    if form is None:
        return None
    out, dout = call.out.flatten(0, 1), call.dout.flatten(0, 1)
    lse = _lse_rows(call.lse)
    dlse = None if call.dlse is None else _lse_rows(call.dlse)
    dq, dk, dv = (None if x is None else x.flatten(0, 1) for x in written)
    said = form.mask, form.scores, form.layout, call.deterministic
    packed = BackwardCall(form.q, form.k, form.v, out, lse, dout, dlse, dq, dk, dv, None, *said)
    return packed, form.layout.cu_seqlens_q


def contents_of(traced: Traced | None) -> tuple[Any, ...]:
    """What a remembered backward call compares before what functions captured: a tuple with the places of the
    tensors that documents are read from, which it may keep, or nothing."""
    form = None if traced is None else document_form(traced.mod, traced.numbers)
    return () if form is None else ((form.tensor, *form.small),)


def _rows(*tensors: Tensor) -> list[Tensor] | None:
    """(batch, seq, heads, d) as (rows, heads, d), in the same memory; None: they lie otherwise."""
    if all(x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in tensors):
        return [x.flatten(0, 1) for x in tensors]
    return None


def _lse_rows(x: Tensor) -> Tensor:
    """(batch, heads, seq) as contiguous (heads, rows): the same memory where a packed call has written it."""
    return x.transpose(0, 1).flatten(1).contiguous()


# ---------------------------------------------------------------------- documents
def forget() -> None:
    """Reads all documents anew from now on."""
    _kept.clear()


def _documents(traced: Traced, form: DocumentForm, q: Tensor) -> _Documents | None:
    """The documents of a call; None: they are no runs of places, or nobody can tell whether they change."""
    tensor, *small = (traced.tensors[i] for i in (form.tensor, *form.small))
    batch, seq_len = q.shape[:2]
    if tensor.shape[-1] < seq_len or (form.by_item and len(tensor) < batch):
        return None
    if any(x.is_inference() for x in (tensor, *small)):
        return None
    if torch.cuda.is_current_stream_capturing():  # the graph is run again with others
        return None
    owners = [x if x._base is None else x._base for x in (tensor, *small)]
    where = [
        (id(owner), x._version, x.data_ptr(), tuple(x.shape), x.stride(), x.dtype)
        for owner, x in zip(owners, (tensor, *small), strict=True)
    ]
    key = (*where, form.by_item, batch, seq_len, current_stream(q.get_device()))
    known = _kept.pop(key, None)
    if known is None or any(ref() is not owner for ref, owner in zip(known.owners, owners, strict=True)):
        numbers = tensor[:batch, :seq_len] if form.by_item else tensor[None, :seq_len]
        known = _read(numbers, batch, owners)
        if not all(_is_small(x) for x in small):
            known = known._replace(longest=0)
    _kept[key] = known
    if len(_kept) > KEPT:
        _kept.popitem(last=False)
    return known if known.longest else None


def _is_small(x: Tensor) -> bool:
    """Whether whole numbers of 32 bits hold all elements."""
    return x.numel() == 0 or bool((x.min() >= -(2**31)) & (x.max() < 2**31))


def _read(numbers: Tensor, batch: int, owners: Sequence[Tensor]) -> _Documents:
    """The documents by their numbers, (batch | 1, seq); of length 0 where a number stands in several runs."""
    host = numbers.cpu()
    begins = torch.ones_like(host, dtype=torch.bool)
    begins[:, 1:] = host[:, 1:] != host[:, :-1]
    first = [row[begin] for row, begin in zip(host, begins, strict=True)]
    are_runs = all(len(x) == len(x.unique()) for x in first)
    begins = begins.expand(batch, -1).flatten()
    ends = torch.cat((begins.nonzero().flatten(), torch.tensor([len(begins)], device="cpu")))
    longest = int(ends.diff().max()) if are_runs else 0
    return _Documents(ends.int().to(numbers.device), ends, longest, tuple(map(weakref.ref, owners)))


def _time_of_mask(documents: _Documents, seq_len: int, d_head: int) -> float:
    """About what part of the time of packed sequences a kernel with a mask takes."""
    rows, columns, asked = SMALL_TILE if d_head <= SMALL_HEAD else TILE
    begins, ends = documents.ends[:-1], documents.ends[1:]
    lengths = ends - begins
    packed = _up(lengths, rows) * (rows // GROUP) * (_up(lengths, columns) + ITEM)
    # Of each group of queries the first and the last document, with the keys of both and those between.
    item = torch.arange(0, int(ends[-1]), seq_len, device="cpu")[:, None]
    first = item + torch.arange(0, seq_len, GROUP, device="cpu")
    last = torch.minimum(first + GROUP, item + seq_len) - 1
    of_first, of_last = (torch.searchsorted(ends, at, right=True) for at in (first, last))
    begin, end = begins[of_first] - item, ends[of_last] - item
    visited = _up(end, columns) - begin // columns
    full = torch.clamp(end // columns - _up(begin, columns), min=0) * (of_first == of_last)
    masked = visited + asked * (visited - full) + ITEM
    return float(masked.sum() / packed.sum())


def _up(x: Tensor, size: int) -> Tensor:
    return -(-x // size)
