"""Runs the programs of ``all_gather`` and ``ring`` on tensors: keys travel, queries stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attention.distributed import pairs
from flash_attention.distributed.accumulate import Accumulator, rows_of
from flash_attention.distributed.pairs import Arithmetic
from flash_attention.distributed.schedule import Message, Part, Schedule
from flash_attention.distributed.transport import Parcel, Transport


@dataclass(frozen=True)
class Plan:
    """All that a call is beside its tensors.

    Attributes:
        schedule: who sends what when, and who computes what.
        transport: by which messages travel.
        arithmetic: what is computed; with fewer streaming multiprocessors while messages travel.
        alone: likewise while none travels.
        with_lse: the caller has the LSE, which then may have a gradient on one rank and none on another.
    """

    schedule: Schedule
    transport: Transport
    arithmetic: Arithmetic
    alone: Arithmetic
    with_lse: bool = False

    @property
    def rank(self) -> int:
        return self.transport.rank

    def during(self, travelling: bool) -> Arithmetic:
        return self.arithmetic if travelling else self.alone


def forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> Accumulator:
    """Queries of this rank over all keys that they see, without sinks.

    Args:
        q: (batch, rows of this rank, heads, d).
        k: (batch, rows of this rank, kv heads, d).
        v: (batch, rows of this rank, kv heads, d_v).
    """
    result = Accumulator(q, v.shape[3])
    block: tuple[Tensor, ...] = (k, v)
    steps = plan.schedule.forward(plan.rank)
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        sends = [Parcel(m, taken((k, v), m.rows)) for m in step.sends]
        receives = [Parcel(m, room(m, (k, v))) for m in step.receives]
        pending = plan.transport.start(sends, receives)
        arithmetic = plan.during(bool(sends or receives))
        for tile in step.tiles:
            block_k, block_v = (x[:, rows_of(tile.k)] for x in block)
            result.add(tile, *pairs.attend(q[:, rows_of(tile.q)], block_k, block_v, tile, arithmetic))
        pending.wait()
        if following is not None:
            block = assembled(following.block, receives, (k, v))
    return result


def backward(
    plan: Plan,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of this rank, float32, added up in a fixed order.

    Args:
        dout: gradient of the output, like out.
        dlse: gradient of the LSE, or None.
        q, k, v: as in ``forward``.
        out: the output over all keys, with sinks.
        lse: its LSE.
    """
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    block: tuple[Tensor, ...] = (k, v)
    sums: tuple[Tensor, ...] = (dk, dv)
    arrived: list[Parcel] = []  # what the block consists of
    ready: dict[Message, tuple[Tensor, ...]] = {}  # gradients of what was received, by the message back
    steps = plan.schedule.backward(plan.rank)
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        sends = [Parcel(m, ready.pop(m) if m.payload == "dkv" else taken((k, v), m.rows)) for m in step.sends]
        receives = [Parcel(m, room(m, (dk, dv) if m.payload == "dkv" else (k, v))) for m in step.receives]
        pending = plan.transport.start(sends, receives)
        arithmetic = plan.during(bool(sends or receives))
        for tile in step.tiles:
            rows, keys = rows_of(tile.q), rows_of(tile.k)
            one_dq, one_dk, one_dv = pairs.gradients(
                dout[:, rows], q[:, rows], block[0][:, keys], block[1][:, keys], out[:, rows],
                lse[:, :, rows], None if dlse is None else dlse[:, :, rows], tile, arithmetic,
            )  # fmt: skip
            dq[:, rows] += one_dq
            sums[0][:, keys] += one_dk
            sums[1][:, keys] += one_dv
        pending.wait()
        for parcel in arrived:
            m = parcel.message
            back = Message(m.target, m.source, "dkv", m.rows, m.owner)
            ready[back] = separated(step.block, m, sums)
        for parcel in receives:
            if parcel.message.payload == "dkv":
                add_rows((dk, dv), parcel)
        arrived = [parcel for parcel in receives if parcel.message.payload == "kv"]
        if following is not None:
            block = assembled(following.block, arrived, (k, v))
            sums = tuple(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in block)
    return dq, dk, dv


# ---------------------------------------------------------------------- rows of tensors
def taken(tensors: Sequence[Tensor], rows: Sequence[range]) -> tuple[Tensor, ...]:
    """Some rows of (batch, rows, heads, d), one behind the other and contiguous."""
    if len(rows) == 1:
        return tuple(x[:, rows_of(rows[0])].contiguous() for x in tensors)
    return tuple(torch.cat([x[:, rows_of(r)] for r in rows], 1) for x in tensors)


def room(message: Message, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Memory for the rows of a message."""
    return tuple(x.new_empty((x.shape[0], message.count, *x.shape[2:])) for x in like)


def assembled(block: Sequence[Part], parcels: Sequence[Parcel], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors of a block from the messages that brought its rows."""
    if len(parcels) == 1:
        return parcels[0].tensors
    if not block:
        return tuple(x[:, :0] for x in like)
    begins = {p.message.owner: _begins(p.message) for p in parcels}
    by_owner = {p.message.owner: p.tensors for p in parcels}
    places = [(by_owner[part.owner], _place(begins[part.owner], part)) for part in block]
    return tuple(
        torch.cat([tensors[i][:, rows_of(rows)] for tensors, rows in places], 1) for i in range(len(like))
    )


def separated(block: Sequence[Part], message: Message, sums: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of a block's tensors the rows that a message brought, in its order, contiguous."""
    begins = _begins(message)
    found: list[tuple[int, range]] = []  # (place in the message, rows of the block)
    begin = 0
    for part in block:
        end = begin + len(part.rows)
        if part.owner == message.owner:
            found.append((_place(begins, part).start, range(begin, end)))
        begin = end
    return taken(sums, [rows for _, rows in sorted(found, key=lambda pair: pair[0])])


def add_rows(sums: Sequence[Tensor], parcel: Parcel) -> None:
    """Adds the rows of a message to those of their owner."""
    begin = 0
    for rows in parcel.message.rows:
        for whole, part in zip(sums, parcel.tensors, strict=True):
            whole[:, rows_of(rows)] += part[:, begin : begin + len(rows)]
        begin += len(rows)


def _begins(message: Message) -> list[tuple[range, int]]:
    """Each range of rows with its place in the message."""
    found, begin = [], 0
    for rows in message.rows:
        found.append((rows, begin))
        begin += len(rows)
    return found


def _place(begins: list[tuple[range, int]], part: Part) -> range:
    """Where a part's rows lie in the message that has them."""
    for rows, begin in begins:
        if rows.start <= part.rows.start and part.rows.stop <= rows.stop:
            first = begin + part.rows.start - rows.start
            return range(first, first + len(part.rows))
    raise AssertionError(f"{part} was not received")
