"""A call of the backward pass on the CPU, item by item: by PyTorch's own where its attention ran forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attention.backends import cpu_backward, cpu_fused_backward
from flash_attention.backends.cpu_backward import Gradients
from flash_attention.backends.cpu_dropout import BlockDropout
from flash_attention.backends.cpu_mods import BlockMods
from flash_attention.backends.sink_gradient import sink_gradient
from flash_attention.backward_call import BackwardCall
from flash_attention.layouts import Cached, Packed
from flash_helpers.select.chosen import Choice


class Item(NamedTuple):
    """Batch items of one length: (batch, seq, heads, d), of LSEs (batch, heads, seq).

    ``first`` is the place of the first of them in the call, as in ``cpu_items``.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    gradients: Gradients
    first: int = 0


@torch.autocast("cpu", enabled=False)  # which would round the factors of float32 products
def run_backward(call: BackwardCall, choice: Choice) -> None:
    """Writes the gradients of a call. Equal calls give equal bits, ``deterministic`` or not.

    Args:
        choice: what computes it.
    """
    if call.dsinks is not None:
        call.dsinks.zero_()
    sinks_sum = None if call.dsinks is None else torch.zeros_like(call.dsinks, dtype=torch.float32)
    captured = {
        slot: torch.zeros(x.shape, dtype=torch.float64, device="cpu") for slot, x in call.dcaptured.items()
    }
    for item in _items(call):
        item = item._replace(gradients=replace(item.gradients, captured=captured))
        left, right = call.mask.limits(item.q.shape[1], item.k.shape[1])
        _run_item(call, choice, item, left, right)
        if sinks_sum is not None and item.gradients.dsinks is not None:
            sinks_sum += item.gradients.dsinks
    if call.dsinks is not None and sinks_sum is not None:
        call.dsinks.copy_(sinks_sum)
    for slot, total in captured.items():
        call.dcaptured[slot].copy_(total)


def _run_item(call: BackwardCall, choice: Choice, item: Item, left: int | None, right: int | None) -> None:
    dout, q, k, v, out, lse, dlse, gradients, first = item
    scale, softcap, sinks, traced = call.scores
    if gradients.dsinks is not None and sinks is not None:
        gradients.dsinks.copy_(sink_gradient(sinks, lse, cpu_backward.delta_of(dout, out, lse, dlse)))
        gradients = replace(gradients, dsinks=None)
    group = q.shape[2] // k.shape[2] if k.shape[2] else 1
    everything = (slice(0, q.shape[0]), slice(0, k.shape[2]))
    mods = None
    places = range(first, first + q.shape[0]), range(q.shape[2]), group
    if traced is not None:
        mods = BlockMods(traced, *places)
    dropout = None if call.dropout is None else BlockDropout(call.dropout, *places)
    left_over: list[tuple[slice, slice]] = [everything]
    if choice.fused:
        left_over = list(
            cpu_fused_backward.backward(dout, q, k, v, out, lse, dlse, scale, gradients, left, right)
        )
    for parts, heads_kv in left_over:
        heads = slice(heads_kv.start * group, heads_kv.stop * group)
        cpu_backward.backward(
            choice.kernel.config,
            dout[parts, :, heads],
            q[parts, :, heads],
            k[parts, :, heads_kv],
            v[parts, :, heads_kv],
            out[parts, :, heads],
            lse[parts, heads],
            None if dlse is None else dlse[parts, heads],
            scale,
            gradients.of(parts, heads, heads_kv),
            left=left,
            right=right,
            softcap=softcap,
            sinks=None if sinks is None else sinks[heads],
            mods=None if mods is None else mods.part(parts, heads),
            dropout=None if dropout is None else dropout.part(parts, heads),
        )


# ---------------------------------------------------------------------- items
def _items(call: BackwardCall) -> Iterator[Item]:
    """The dense parts of a call. What no part has is zero: padding, and keys behind an item's last."""
    if isinstance(call.layout, Packed):
        yield from _sequences(call, call.layout)
    elif isinstance(call.layout, Cached):
        yield from _cached(call, call.layout)
    else:
        gradients = Gradients(call.dq, call.dk, call.dv, _own_dsinks(call))
        yield Item(call.dout, call.q, call.k, call.v, call.out, call.lse, call.dlse, gradients)


def _sequences(call: BackwardCall, layout: Packed) -> Iterator[Item]:
    ends_q, ends_k = layout.cu_seqlens_q.tolist(), layout.cu_seqlens_k.tolist()
    _fill_with_zeros(call.dq, slice(ends_q[-1], None))
    for grad in (call.dk, call.dv):
        _fill_with_zeros(grad, slice(ends_k[-1], None))
    for i in range(len(ends_q) - 1):
        queries, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        dq = None if call.dq is None else call.dq[None, queries]
        dk, dv = (None if x is None else x[None, keys] for x in (call.dk, call.dv))
        yield Item(
            call.dout[None, queries],
            call.q[None, queries],
            call.k[None, keys],
            call.v[None, keys],
            call.out[None, queries],
            call.lse[None, :, queries],
            None if call.dlse is None else call.dlse[None, :, queries],
            Gradients(dq, dk, dv, _own_dsinks(call)),
            i,
        )


def _cached(call: BackwardCall, layout: Cached) -> Iterator[Item]:
    for i, n in enumerate(layout.seqused_k.clamp(0, call.k.shape[1]).tolist()):
        one = slice(i, i + 1)
        for grad in (call.dk, call.dv):
            if grad is not None:
                _fill_with_zeros(grad[i], slice(n, None))
        dq = None if call.dq is None else call.dq[one]
        dk, dv = (None if x is None else x[one, :n] for x in (call.dk, call.dv))
        yield Item(
            call.dout[one],
            call.q[one],
            call.k[one, :n],
            call.v[one, :n],
            call.out[one],
            call.lse[one],
            None if call.dlse is None else call.dlse[one],
            Gradients(dq, dk, dv, _own_dsinks(call)),
            i,
        )


def _own_dsinks(call: BackwardCall) -> Tensor | None:
    """Room for one item's share, in float32: items are summed before the one rounding."""
    return None if call.dsinks is None else torch.zeros_like(call.dsinks, dtype=torch.float32)


def _fill_with_zeros(grad: Tensor | None, rows: slice) -> None:
    if grad is not None:
        grad[rows].zero_()
