"""Calls whose mask says of which document a place is, as calls on packed sequences.

Kernels of packed sequences begin their blocks where a document does, and look at no element of a mask. A mask
``T[q_idx] == T[kv_idx]``, within a band or not, becomes offsets (``run/documents.py``). Where rows of batch
items lie one behind the other, all items are one packed call. Where they do not, as in tensors of (batch,
heads, seq, d), turned, each item is one, on views of the call's tensors. Several launches are no remembered
call: each such call takes the long way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from flash_attention.backward_call import BackwardCall
from flash_attention.call import Call, Mask, Scores
from flash_attention.devices import backend
from flash_attention.layouts import Dense, Layout, Packed
from flash_attention.options import Options
from flash_attention.run.documents import are_quicker_packed, documents_of
from flash_helpers.mods.documents import document_form
from flash_helpers.mods.plain_forms import Band

# Items are calls of their own where each has so many blocks of these rows for each SM, so that few SMs wait
# for its last ones, and where products take the GPU longer than calls take the host: a launch as long as so
# many operations of each SM (63 µs on an H200's host, where a causal mask hides half of them), the way to the
# first one as long as so many launches (benchmarks/results/h200-mods-document-items.json).
BLOCK, BLOCKS_PER_SM = 128, 4
FLOP_PER_SM, LAUNCHES_BEFORE = 2**29, 6


class PackedForm(NamedTuple):
    """What a call is on packed sequences.

    Attributes:
        mask: what is left of its mask.
        scores: what is left of its scores.
        layouts: that of the one call on the rows of all batch items, or those of one call for each item.
    """

    mask: Mask
    scores: Scores
    layouts: tuple[Packed, ...]

    @property
    def apart(self) -> bool:
        """Whether each batch item is a call."""
        return len(self.layouts) > 1

    @property
    def kept(self) -> Tensor | None:
        """What the one launch reads beside tensors of the call; None: there are several."""
        return None if self.apart else self.layouts[0].cu_seqlens_q

    def rows(self, x: Tensor | None) -> Sequence[Any]:
        """(batch, seq, heads, d) as each of the calls takes it, (rows, heads, d); None as it is."""
        if x is None:
            return (None,) * len(self.layouts)
        return x.unbind() if self.apart else (x.flatten(0, 1),)

    def lse_rows(self, x: Tensor | None) -> Sequence[Any]:
        """(batch, heads, seq) as each of the calls takes it, contiguous (heads, rows), in the same memory if
        it was made for such calls; None as it is."""
        if x is None:
            return (None,) * len(self.layouts)
        items = x.unbind() if self.apart else (x.transpose(0, 1).flatten(1),)
        return [item.contiguous() for item in items]


def packed_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scores: Scores,
    layout: Layout,
    options: Options,
    others: Sequence[Tensor | None] = (),
    *,
    with_gradients: bool,
) -> PackedForm | None:
    """What a call is on packed sequences; None: it stays as it is.

    Args:
        q, k, v, mask, scores, layout, options: of the call.
        others: tensors like q, k or v that it reads or writes, too; None: one that is made for it.
        with_gradients: it has a backward pass, or is one.
    """
    traced = scores.traced
    if traced is None or scores.sinks is not None or not isinstance(layout, Dense):
        return None
    if not (q.is_cuda and q.numel()) or not _are_of_packed_calls(options, q):
        return None
    form = document_form(traced.mod, traced.numbers)
    if form is None or q.shape[1] != k.shape[1]:
        return None
    batch = q.shape[0]
    apart = batch > 1 and (options.return_lse or not _are_rows(q, k, v, *others))
    if apart and not _fills_the_device(q, k, with_gradients):
        return None
    found = documents_of(traced, form, q, apart=apart)
    if found is None or not are_quicker_packed(found, with_gradients=with_gradients):
        return None
    if apart and not _outlasts_the_host(q, found.pairs):
        return None
    low, high = form.band.within(Band(None if mask.left is None else -mask.left, mask.right))
    offsets = found.offsets.expand(batch if apart else 1, -1).unbind()
    return PackedForm(
        Mask(None if low is None else -low, high),
        scores._replace(traced=None),
        tuple(Packed(x, x, found.longest, found.longest) for x in offsets),
    )


def as_packed(
    call: Call, options: Options, *, with_gradients: bool
) -> tuple[Call, list[Call], Tensor | None] | None:
    """The call with the LSE that it writes, the calls on packed sequences, and what the launch keeps where
    there is one; None: it stays as it is.

    Args:
        call: the call.
        options: its options.
        with_gradients: a backward pass will follow.
    """
    form = packed_form(*call.parts, options, (call.out,), with_gradients=with_gradients)
    if form is None:
        return None
    if call.lse is not None and not form.apart:
        batch, seq_len, n_heads, _ = call.q.shape
        lse = call.lse.new_empty(n_heads, batch, seq_len)
        call = replace(call, lse=lse.transpose(0, 1))
    rows = map(form.rows, (call.q, call.k, call.v, call.out))
    calls = [
        Call(q, k, v, out, lse, form.mask, form.scores, layout)
        for q, k, v, out, lse, layout in zip(*rows, form.lse_rows(call.lse), form.layouts, strict=True)
    ]
    return call, calls, form.kept


def gradients_as_packed(
    call: BackwardCall, options: Options
) -> tuple[list[BackwardCall], Tensor | None] | None:
    """The calls on packed sequences, and what the launch keeps where there is one; None: it stays as it is,
    as where the forward pass did."""
    written = call.dq, call.dk, call.dv
    form = packed_form(*call.parts, options, (call.out, *written), with_gradients=True)
    if form is None:
        return None
    read = map(form.rows, (call.q, call.k, call.v, call.out, call.dout))
    lses = map(form.lse_rows, (call.lse, call.dlse))
    said = form.mask, form.scores
    calls = [
        BackwardCall(q, k, v, out, lse, dout, dlse, dq, dk, dv, None, *said, layout, call.deterministic)
        for q, k, v, out, dout, lse, dlse, dq, dk, dv, layout in zip(
            *read, *lses, *map(form.rows, written), form.layouts, strict=True
        )
    ]
    return calls, form.kept


def _are_of_packed_calls(options: Options, q: Tensor) -> bool:
    """Whether options let a call run on packed sequences."""
    if options.dropout_p or options.numerics is not None or options.n_sms is not None:
        return False
    if options.config is not None or options.backward_config is not None:  # of kernels with the mask
        return False
    return options.out_dtype in (None, q.dtype)


def _are_rows(*tensors: Tensor | None) -> bool:
    """Whether rows of batch items lie one behind the other: (batch, seq, heads, d) are (rows, heads, d)."""
    return all(x is None or x.stride(0) == x.shape[1] * x.stride(1) for x in tensors)


def _fills_the_device(q: Tensor, k: Tensor, with_gradients: bool) -> bool:
    """Whether each batch item has blocks enough to be a call. Blocks of gradients are of key heads."""
    n_heads = k.shape[2] if with_gradients else q.shape[2]
    n_blocks = -(-q.shape[1] // BLOCK) * n_heads
    return n_blocks >= BLOCKS_PER_SM * _n_sms(q)


def _outlasts_the_host(q: Tensor, pairs: float) -> bool:
    """Whether products of so many pairs of rows for each batch item take longer than the host's calls."""
    batch, _, n_heads, d_head = q.shape
    flop = 4 * pairs * n_heads * d_head
    return batch * flop >= (batch + LAUNCHES_BEFORE) * FLOP_PER_SM * _n_sms(q)


def _n_sms(q: Tensor) -> int:
    n_sms: int = backend("cuda").device_facts_of(q.device).sm_count
    return n_sms
