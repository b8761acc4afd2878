"""The documents that masks number, read from tensors, and which kernels are quicker for them.

A mask ``T[q_idx] == T[kv_idx]``, within a band or not, says where documents begin, where each value in T is
one run of places. They are read from T once, which waits for its device, and kept as long as nobody writes
to T.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flash_attention.mods.tracing import Traced
from flash_attention.torch_private import current_stream
from flash_helpers.mods.documents import DocumentForm, document_form

KEPT = 64  # tensors whose documents are kept
# What a mask's kernel and that of packed sequences cost, in tiles of a warpgroup: rows and columns of a tile
# and the cost of asking the mask of its elements, of head sizes up to 64 and of larger ones; the cost of a
# warpgroup's rows beside their tiles. Of times measured on an H200.
GROUP, SMALL_HEAD = 64, 64
SMALL_TILE, TILE, ITEM = (256, 64, 1.4), (128, 128, 0.5), 1.0
# Packed sequences run where a mask's kernel would take this part of their time or more. Backward kernels have
# smaller blocks, so that short documents cost them less.
LEAST, LEAST_WITH_GRADIENTS = 1.0, 0.5


class Documents(NamedTuple):
    """Where documents begin, and where the last one ends.

    Attributes:
        offsets: of each packed call, among its rows: int32, (calls | 1, documents + 1), on the device. Calls
            with fewer documents have empty ones behind them.
        ends: of all calls, their rows one behind the other, on the host.
        longest: rows of the longest document.
        pairs: of a query and a key of one document, of each batch item on average.
        owners: whose memory the tensors are that they were read from.
        time_of_mask: about what part of the time of packed sequences a kernel with the mask takes.
    """

    offsets: Tensor
    ends: Tensor
    longest: int
    pairs: float
    owners: tuple[weakref.ref[Tensor], ...]
    time_of_mask: float = 0.0


_kept: OrderedDict[Any, Documents] = OrderedDict()


def forget() -> None:
    """Reads all documents anew from now on."""
    _kept.clear()


def contents_of(traced: Traced | None) -> tuple[Any, ...]:
    """What a remembered backward call compares before what functions captured: a tuple with the places of the
    tensors that documents are read from, which it may keep, or nothing."""
    form = None if traced is None else document_form(traced.mod, traced.numbers)
    return () if form is None else ((form.tensor, *form.small),)


def documents_of(traced: Traced, form: DocumentForm, q: Tensor, *, apart: bool) -> Documents | None:
    """The documents of a call; None: they are no runs of places, or nobody can tell whether they change.

    Args:
        traced, form: its mask, and what that says.
        q: its queries.
        apart: each batch item is a packed call; else all items are one, their rows one behind the other.
    """
    tensor, *small = (traced.tensors[i] for i in (form.tensor, *form.small))
    batch, seq_len, _, d_head = q.shape
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
    key = (*where, form.by_item, apart, batch, seq_len, d_head, current_stream(q.get_device()))
    known = _kept.pop(key, None)
    if known is None or any(ref() is not owner for ref, owner in zip(known.owners, owners, strict=True)):
        numbers = tensor[:batch, :seq_len] if form.by_item else tensor[None, :seq_len]
        known = _read(numbers, 1 if apart else batch, owners, apart=apart)
        if not all(_is_small(x) for x in small):
            known = known._replace(longest=0)
        known = known._replace(time_of_mask=_time_of_mask(known, seq_len, d_head))
    _kept[key] = known
    if len(_kept) > KEPT:
        _kept.popitem(last=False)
    return known if known.longest else None


def _is_small(x: Tensor) -> bool:
    """Whether whole numbers of 32 bits hold all elements."""
    return x.numel() == 0 or bool((x.min() >= -(2**31)) & (x.max() < 2**31))


def _read(numbers: Tensor, batch: int, owners: Sequence[Tensor], *, apart: bool = False) -> Documents:
    """The documents by their numbers; of length 0 where a number stands in several runs.

    Args:
        numbers: (batch | 1, seq).
        batch: items of a call.
        owners: see ``Documents``.
        apart: each row of numbers is of a call; else the rows of all items are one call's.
    """
    host = numbers.cpu()
    begins = torch.ones_like(host, dtype=torch.bool)
    begins[:, 1:] = host[:, 1:] != host[:, :-1]
    first = [row[begin] for row, begin in zip(host, begins, strict=True)]
    are_runs = all(len(x) == len(x.unique()) for x in first)
    if not apart:
        begins = begins.expand(batch, -1).reshape(1, -1)
    calls = [_offsets(row) for row in begins]
    offsets = pad_sequence(calls, batch_first=True, padding_value=begins.shape[1])
    ends = _offsets(begins.flatten())
    lengths = ends.diff()
    longest = int(lengths.max()) if are_runs else 0
    pairs = float(lengths.square().sum()) * host.shape[1] / len(begins.flatten())
    refs = tuple(map(weakref.ref, owners))
    return Documents(offsets.int().to(numbers.device), ends, longest, pairs, refs)


def _offsets(begins: Tensor) -> Tensor:
    return torch.cat((begins.nonzero().flatten(), torch.tensor([len(begins)], device="cpu")))


# ---------------------------------------------------------------------- which way is quicker
def are_quicker_packed(documents: Documents, *, with_gradients: bool) -> bool:
    """Whether packed sequences are thought to be quicker than a kernel with the mask.

    Args:
        documents: of a call.
        with_gradients: it has a backward pass, or is one.
    """
    return documents.time_of_mask >= (LEAST_WITH_GRADIENTS if with_gradients else LEAST)


def _time_of_mask(documents: Documents, seq_len: int, d_head: int) -> float:
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
