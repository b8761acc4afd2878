"""The keys of each step of a program: own rows, and those that other ranks send."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flash_attention.distributed.blocks import Arrival, Block, own_views, packed
from flash_attention.distributed.copies import copy
from flash_attention.distributed.places import heads_of, rows_of
from flash_attention.distributed.schedule import Part, Schedule, Step
from flash_attention.distributed.transport import Parcel, Pending, Transport


def is_own(step: Step, rank: int, rows: int) -> bool:
    """Whether the block of a step is all rows of a rank itself."""
    return step.block == (Part(rank, range(rows)),) and step.heads_kv is None


class Keys:
    """k and v of the block of each step, and the messages that bring them.

    Args:
        schedule: whose program it is.
        transport: by which messages travel.
        steps: the program of this rank, of either pass.
        own: k and v of this rank's rows.
    """

    def __init__(
        self, schedule: Schedule, transport: Transport, steps: Sequence[Step], own: tuple[Tensor, ...]
    ) -> None:
        self._rank, self._transport, self._steps, self._own = transport.rank, transport, steps, own
        self._blocks: dict[int, Block] = {}
        self._travelling: dict[int, list[tuple[Pending, list[Arrival]]]] = {}
        self._at_once = schedule.at_once
        if self._at_once:
            for number in range(len(steps)):
                self._start(number, *self._parcels(number))
            for number in self._blocks:
                self._fill(number)

    def begin(self, number: int, sends: Sequence[Parcel] = (), receives: Sequence[Arrival] = ()) -> None:
        """Starts the messages of a step that do not travel yet, with others beside those of the keys."""
        if self._at_once:
            self._start(number, sends, receives)
        else:
            keys_sent, keys_that_come = self._parcels(number)
            self._start(number, [*keys_sent, *sends], [*keys_that_come, *receives])

    def end(self, number: int) -> None:
        """Returns when the messages of a step have come, and their rows are in their places."""
        for pending, arrivals in self._travelling.pop(number, ()):
            pending.wait()
            for arrival in arrivals:
                arrival.put()

    def block(self, number: int) -> tuple[Tensor, ...]:
        """k and v of a step's block; the steps before have ended."""
        step = self._steps[number]
        if is_own(step, self._rank, self._own[0].shape[1]):
            return self._own
        return self._blocks.pop(number).tensors if number in self._blocks else self._empty(step).tensors

    # ------------------------------------------------------------------ messages
    def _parcels(self, number: int) -> tuple[list[Parcel], list[Arrival]]:
        """The messages of keys in a step; what they bring is of the next step's block."""
        step = self._steps[number]
        sends = [
            packed(m, own_views(self._own, m, heads_of(m.heads_kv))) for m in step.sends if m.payload == "kv"
        ]
        coming = [m for m in step.receives if m.payload == "kv"]
        if not coming:
            return sends, []
        block = self._blocks[number + 1] = self._empty(self._steps[number + 1])
        return sends, [Arrival.of(m, block.views(m.owner, m.rows)) for m in coming]

    def _start(self, number: int, sends: Sequence[Parcel], receives: Sequence[Arrival]) -> None:
        if sends or receives:
            pending = self._transport.start(sends, [arrival.parcel for arrival in receives])
            self._travelling.setdefault(number, []).append((pending, list(receives)))

    # ------------------------------------------------------------------ blocks
    def _empty(self, step: Step) -> Block:
        rows = sum(len(part.rows) for part in step.block)
        shapes = [x[:, :, heads_of(step.heads_kv)].shape for x in self._own]
        empty = [x.new_empty((s[0], rows, *s[2:])) for x, s in zip(self._own, shapes, strict=True)]
        return Block(step.block, empty)

    def _fill(self, number: int) -> None:
        """Brings own rows to their places in a block."""
        step = self._steps[number]
        heads = heads_of(step.heads_kv)
        for part in step.block:
            if part.owner == self._rank:
                (views,) = self._blocks[number].views(part.owner, [part.rows])
                for x, view in zip(self._own, views, strict=True):
                    copy(view, x[:, rows_of(part.rows), heads])
