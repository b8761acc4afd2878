"""Runs the programs of ``all_gather`` and ``ring`` on tensors: keys travel, queries stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attention.distributed import pairs
from flash_attention.distributed.accumulate import Output
from flash_attention.distributed.blocks import Arrival, Places, Views, packed
from flash_attention.distributed.keys import Keys, is_own
from flash_attention.distributed.pairs import Arithmetic
from flash_attention.distributed.places import heads_of, rows_of
from flash_attention.distributed.schedule import Message, Part, Schedule, Step
from flash_attention.distributed.sums import Sums
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

    def during(self, number: int, step: Step) -> Arithmetic:
        """How the tiles of a step are computed.

        With ``all_gather`` messages are there first, since own rows are copied to their places before; where
        nothing comes, and so nothing is copied, they have multiprocessors of their own as with ``ring``.
        """
        starts = bool(step.sends or step.receives)
        if self.schedule.at_once:
            starts = starts and number == 0 and not step.receives
        return self.arithmetic if starts else self.alone


def forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and LSE of the queries of this rank over all keys that they see.

    Args:
        q: (batch, rows of this rank, heads, d).
        k: (batch, rows of this rank, kv heads, d).
        v: (batch, rows of this rank, kv heads, d_v).
        sinks: (heads,), or None.
    """
    steps = plan.schedule.forward(plan.rank)
    result = Output(q, v.shape[3], plan.schedule.coverage(plan.rank), sinks)
    keys = Keys(plan.schedule, plan.transport, steps, (k, v))
    for number, step in enumerate(steps):
        keys.begin(number)
        block_k, block_v = keys.block(number)
        arithmetic = plan.during(number, step)
        for tile in step.tiles:
            rows = rows_of(tile.k)
            result.add(tile, block_k[:, rows], block_v[:, rows], arithmetic)
        keys.end(number)
    return result.finish()


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
    """Gradients of q, k and v of this rank, added up in float32 in a fixed order and rounded once.

    That of q is of the type of a tile's share where each query is in one tile, which needs no sum.

    Args:
        dout: gradient of the output, like out.
        dlse: gradient of the LSE, or None.
        q, k, v: as in ``forward``.
        out: the output over all keys, with sinks.
        lse: its LSE.
    """
    rank, coverage = plan.rank, plan.schedule.coverage(plan.rank)
    steps = plan.schedule.backward(rank)
    # Where each query is in one tile, its kernel writes what is final.
    dq = torch.empty_like(q, dtype=pairs.gradient_type(q, True) if coverage.once else q.dtype)
    if coverage.once and not coverage.everything:
        dq.zero_()
    of_queries = Sums(q.shape[1], q.shape[2])
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    own = Sums(k.shape[1], k.shape[2])
    ready: dict[Message, Parcel] = {}  # gradients of what was received, by the message back
    keys = Keys(plan.schedule, plan.transport, steps, (k, v))
    for number, step in enumerate(steps):
        returned = [returning(m, (k, v)) for m in step.receives if m.payload == "dkv"]
        keys.begin(number, [ready.pop(m) for m in step.sends if m.payload == "dkv"], returned)
        block_k, block_v = keys.block(number)
        arithmetic = plan.during(number, step)
        sums = own if is_own(step, rank, k.shape[1]) else Sums(block_k.shape[1], block_k.shape[2])
        for tile in step.tiles:
            rows, heads, of_keys = rows_of(tile.q), heads_of(tile.heads), rows_of(tile.k)
            # The first share of all own keys may be what others are added to.
            first = sums is own and not own.begun and tile.k == range(k.shape[1])
            share, *shares = pairs.gradients(
                dout[:, rows, heads], q[:, rows, heads], block_k[:, of_keys], block_v[:, of_keys],
                out[:, rows, heads], lse[:, heads, rows], None if dlse is None else dlse[:, heads, rows],
                tile, arithmetic, dq[:, rows, heads] if coverage.once else None,
                (dk, dv) if first and pairs.key_gradient_type(k) is k.dtype else None,
            )  # fmt: skip
            if not coverage.once:
                of_queries.add((share,), tile.q, tile.heads)
            sums.add(shares, tile.k)
        keys.end(number)
        if sums is not own and step.block:
            ready.update(_given_back(step, sums, own, (k, v), rank, steps[number - 1].receives))
        for arrival in returned:
            m = arrival.parcel.message
            for of_range, came in zip(m.rows, arrival.views, strict=True):
                own.add(came, of_range, m.heads_kv)
    own.write((dk, dv))
    if not coverage.once:
        of_queries.write((dq,))
    return dq, dk, dv


def _given_back(
    step: Step, sums: Sums, own: Sums, like: Sequence[Tensor], rank: int, arrived: Sequence[Message]
) -> dict[Message, Parcel]:
    """Moves own rows of the gradients of a block to their sums; what goes back of the others."""
    places = Places(step.block)
    for part in step.block:
        if part.owner == rank:
            sums.move(places.rows(part), own, part.rows, step.heads_kv)
    back = [m.back() for m in arrived if m.payload == "kv"]
    return {m: summed(m, sums, [places.rows(Part(m.owner, rows)) for rows in m.rows], like) for m in back}


def summed(message: Message, sums: Sums, places: Sequence[range], like: Sequence[Tensor]) -> Parcel:
    """A message that takes the sums of some rows, float32."""
    rooms = _rooms(message, like)
    for room, rows in zip(rooms, places, strict=True):
        sums.write(room, rows)
    return packed(message, rooms)


def returning(message: Message, own: Sequence[Tensor]) -> Arrival:
    """Gradients that come back, in memory of their own: they are added up in a fixed order."""
    return Arrival.of(message, _rooms(message, own))


def _rooms(message: Message, like: Sequence[Tensor]) -> Views:
    """float32 memory for each range of rows of a message."""
    heads = range(*heads_of(message.heads_kv).indices(like[0].shape[2]))
    return [
        tuple(
            torch.empty(x.shape[0], len(rows), len(heads), x.shape[3], dtype=torch.float32, device=x.device)
            for x in like
        )
        for rows in message.rows
    ]
