"""Runs the program of ``ulysses`` on tensors: each rank computes some heads over the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attention.distributed import pairs
from flash_attention.distributed.accumulate import Output
from flash_attention.distributed.copies import contiguous, copy
from flash_attention.distributed.engine import Plan
from flash_attention.distributed.places import heads_of, rows_of
from flash_attention.distributed.schedule import Message, Step
from flash_attention.distributed.sums import Sums
from flash_attention.distributed.transport import Parcel


class Gathered(NamedTuple):
    """The heads of this rank over the whole sequence, kept for the backward pass.

    Attributes:
        q: (batch, total, heads of this rank, d).
        k: (batch, total, kv heads of this rank, d).
        v: (batch, total, kv heads of this rank, d_v).
        out: the output with sinks, like q with d_v.
        lse: (batch, heads of this rank, total).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Gathered]:
    """The output and the LSE of this rank's rows, and what the backward pass needs."""
    heads, heads_kv = (slice(*h) for h in _own_heads(plan))
    exchange, compute, send_back = plan.schedule.forward(plan.rank)
    all_q, all_k, all_v = _empty(plan, q, heads), _empty(plan, k, heads_kv), _empty(plan, v, heads_kv)
    _exchange(plan, exchange, (q, k, v), (all_q, all_k, all_v), (1, 1, 1))
    coverage = plan.schedule.coverage(plan.rank)
    result = Output(all_q, v.shape[3], coverage, None if sinks is None else sinks[heads])
    arithmetic = plan.alone.of_heads(heads.start)
    for tile in compute.tiles:
        one_k, one_v = (x[:, rows_of(tile.k), heads_of(tile.heads_kv)] for x in (all_k, all_v))
        result.add(tile, one_k, one_v, arithmetic)
    out_heads, lse_heads = result.finish()
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    _return(plan, send_back, (out_heads, lse_heads), (out, lse), (1, 2))
    return out, lse, Gathered(all_q, all_k, all_v, out_heads, lse_heads)


def backward(
    plan: Plan, dout: Tensor, dlse: Tensor | None, kept: Gathered, heads_of_call: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k and v of this rank, float32, then dout and dlse of its heads over the sequence.

    Args:
        dout: gradient of the output of this rank's rows.
        dlse: gradient of their LSE, or None.
        kept: of ``forward``.
        heads_of_call: query heads and kv heads of the call.
    """
    heads, _ = (slice(*h) for h in _own_heads(plan))
    exchange, compute, send_back = plan.schedule.backward(plan.rank)
    given = (dout,) if dlse is None else (dout, dlse)
    whole = [_empty(plan, dout, heads)]
    if dlse is not None:
        whole.append(dlse.new_empty((dlse.shape[0], *kept.lse.shape[1:])))
    _exchange(plan, exchange, given, whole, (1, 2)[: len(given)])
    dout_heads, dlse_heads = whole[0], whole[1] if dlse is not None else None
    arithmetic = plan.alone.of_heads(heads.start)
    of_each = [Sums(x.shape[1], x.shape[2]) for x in kept[:3]]
    once = plan.schedule.coverage(plan.rank).once
    for tile in compute.tiles:
        assert tile.heads is not None
        assert tile.heads_kv is not None
        q, k = (rows_of(tile.q), slice(*tile.heads)), (rows_of(tile.k), slice(*tile.heads_kv))
        own_q = kept.q[:, q[0], q[1]]
        shares = pairs.gradients(
            dout_heads[:, q[0], q[1]], own_q, kept.k[:, k[0], k[1]], kept.v[:, k[0], k[1]],
            kept.out[:, q[0], q[1]], kept.lse[:, q[1], q[0]],
            None if dlse_heads is None else dlse_heads[:, q[1], q[0]], tile, arithmetic,
            torch.empty(own_q.shape, dtype=pairs.gradient_type(own_q, True), device=own_q.device)
            if once
            else None,
        )  # fmt: skip
        places = ((tile.q, tile.heads), (tile.k, tile.heads_kv), (tile.k, tile.heads_kv))
        for total, share, place in zip(of_each, shares, places, strict=True):
            total.add((share,), *place)
    sums = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in kept[:3]]
    for total, x in zip(of_each, sums, strict=True):
        total.write((x,))
    batch, rows = dout.shape[:2]
    n_heads, n_heads_kv = heads_of_call
    counts = (n_heads, n_heads_kv, n_heads_kv)
    grads = tuple(x.new_zeros((batch, rows, n, x.shape[3])) for x, n in zip(sums, counts, strict=True))
    # Of a key head that several ranks have, each has a share of the gradient: they add up.
    _return(plan, send_back, sums, grads, (1, 1, 1), add=True)
    dq, dk, dv = grads
    return dq, dk, dv, dout_heads, dlse_heads


# ---------------------------------------------------------------------- exchanges
def _own_heads(plan: Plan) -> tuple[tuple[int, int], tuple[int, int]]:
    schedule = plan.schedule
    return schedule.heads_of(plan.rank), schedule.heads_kv_of(plan.rank)


def _empty(plan: Plan, x: Tensor, heads: slice) -> Tensor:
    return x.new_empty((x.shape[0], plan.schedule.layout.total, heads.stop - heads.start, x.shape[3]))


def _exchange(
    plan: Plan, step: Step, own: Sequence[Tensor], whole: Sequence[Tensor], rows_in: Sequence[int]
) -> None:
    """Own rows of the others' heads for the others' rows of own heads."""
    sends = [Parcel(m, _heads(own, rows_in, m)) for m in step.sends]
    receives = [Parcel(m, _room(plan, m, whole, rows_in)) for m in step.receives]
    pending = plan.transport.start(sends, receives)
    heads, heads_kv = _own_heads(plan)
    own_share = Message(plan.rank, plan.rank, "qkv", (), plan.rank, heads, heads_kv)
    _place(plan, plan.rank, _heads(own, rows_in, own_share), whole, rows_in)
    pending.wait()
    for parcel in receives:
        _place(plan, parcel.message.owner, parcel.tensors, whole, rows_in)


def _return(
    plan: Plan,
    step: Step,
    whole: Sequence[Tensor],
    own: Sequence[Tensor],
    rows_in: Sequence[int],
    add: bool = False,
) -> None:
    """The others' rows of own heads for own rows of the others' heads."""
    sends = [Parcel(m, _rows(plan, m.owner, whole, rows_in)) for m in step.sends]
    receives = [
        Parcel(m, tuple(x.new_empty(x.shape) for x in _views(own, rows_in, m))) for m in step.receives
    ]
    pending = plan.transport.start(sends, receives)
    heads, heads_kv = _own_heads(plan)
    mine = Message(plan.rank, plan.rank, "out", (), plan.rank, heads, heads_kv)
    kept = Parcel(mine, _rows(plan, plan.rank, whole, rows_in))
    pending.wait()
    # In the order of the ranks, whoever comes first.
    for parcel in sorted([*receives, kept], key=lambda p: p.message.source):
        views = _views(own, rows_in, parcel.message)
        for view, x in zip(views, parcel.tensors, strict=True):
            view.add_(x) if add else copy(view, x)


def _views(tensors: Sequence[Tensor], rows_in: Sequence[int], message: Message) -> list[Tensor]:
    """Views of the heads of a message: the first tensor and each with its rows behind its heads has query
    heads, the others have key heads."""
    assert message.heads is not None
    assert message.heads_kv is not None
    found = []
    for number, (x, dim) in enumerate(zip(tensors, rows_in, strict=True)):
        heads = message.heads if number == 0 or dim == 2 else message.heads_kv
        found.append(x[:, slice(*heads)] if dim == 2 else x[:, :, slice(*heads)])
    return found


def _heads(tensors: Sequence[Tensor], rows_in: Sequence[int], message: Message) -> tuple[Tensor, ...]:
    return tuple(contiguous(x) for x in _views(tensors, rows_in, message))


def _room(
    plan: Plan, message: Message, whole: Sequence[Tensor], rows_in: Sequence[int]
) -> tuple[Tensor, ...]:
    count = plan.schedule.layout.lengths[message.owner]
    shapes = [(*x.shape[:dim], count, *x.shape[dim + 1 :]) for x, dim in zip(whole, rows_in, strict=True)]
    return tuple(x.new_empty(shape) for x, shape in zip(whole, shapes, strict=True))


def _rows(plan: Plan, owner: int, whole: Sequence[Tensor], rows_in: Sequence[int]) -> tuple[Tensor, ...]:
    """The rows of a rank out of the whole sequence, contiguous."""
    runs = plan.schedule.layout.ranks[owner]
    found = []
    for x, dim in zip(whole, rows_in, strict=True):
        pieces = [x[(slice(None),) * dim + (rows_of(run),)] for run in runs]
        empty = x.narrow(dim, 0, 0)
        found.append(torch.cat(pieces, dim) if pieces else empty.contiguous())
    return tuple(found)


def _place(
    plan: Plan, owner: int, tensors: Sequence[Tensor], whole: Sequence[Tensor], rows_in: Sequence[int]
) -> None:
    """Writes the rows of a rank into the whole sequence."""
    begin = 0
    for run in plan.schedule.layout.ranks[owner]:
        for x, into, dim in zip(tensors, whole, rows_in, strict=True):
            copy(into[(slice(None),) * dim + (rows_of(run),)], x.narrow(dim, begin, len(run)))
        begin += len(run)
