"""Schedules of context-parallel attention as data: who sends what when, and who computes which tiles.

A ``Schedule`` makes the program of each rank: steps, whose messages travel while their tiles are computed.
Nothing here knows tensors or processes, so that tests can run the programs of any number of ranks as a graph.

Three methods, in which a rank gets no row that none of its queries sees:

``all_gather``: one exchange brings a rank all the keys it sees, while it computes on its own.
``ring``: in step i rank r computes on keys of rank r - i, while those of rank r - i - 1 travel. A block comes
straight from its owner, so that nobody forwards what he doesn't need.
``ulysses``: an exchange turns shards of the sequence into shards of the heads, and one turns the result back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from flash_attention.call import Mask
from flash_attention.distributed import tiles as t
from flash_attention.distributed.layout import Layout
from flash_attention.distributed.tiles import Piece, Tile

Method = Literal["all_gather", "ring", "ulysses"]
METHODS: tuple[Method, ...] = ("all_gather", "ring", "ulysses")
Payload = Literal["kv", "dkv", "qkv", "out", "dout", "dqkv"]


class Heads(NamedTuple):
    """Head counts of a call."""

    q: int
    kv: int

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.q // self.kv if self.kv else 1


@dataclass(frozen=True)
class Message:
    """What one rank sends another.

    Attributes:
        source: the rank that sends.
        target: the rank that receives.
        payload: ``kv`` keys and values; ``dkv`` their gradients in float32; ``qkv``, ``out``, ``dout`` and
            ``dqkv`` likewise for some heads: ``out`` has the LSE with it, ``dout`` its gradient.
        rows: ranges of rows of ``owner``.
        owner: whose rows they are: of the source, or of the target for what is sent back.
        heads: (first, last) of the query heads; None: the payload has none.
        heads_kv: likewise of the key heads; None: all.
    """

    source: int
    target: int
    payload: Payload
    rows: tuple[range, ...]
    owner: int
    heads: tuple[int, int] | None = None
    heads_kv: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(map(len, self.rows))


class Part(NamedTuple):
    """Some rows of an owner as they lie in a block of keys, one part behind the other."""

    owner: int
    rows: range


@dataclass(frozen=True)
class Step:
    """Messages that travel while tiles are computed; both end before the next step begins.

    Attributes:
        sends: messages of this rank; what they carry was there before the step.
        receives: messages to this rank; what they bring is used in later steps.
        block: the rows that the keys of the tiles count; for ``ulysses`` the sequence itself.
        tiles: what is computed, in this order.
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    block: tuple[Part, ...] = ()
    tiles: tuple[Tile, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """One method for one layout and mask.

    Attributes:
        method: how keys and queries meet.
        layout: which rank holds which rows.
        mask: which keys a query sees, in positions of the sequence.
        heads: head counts; ``ulysses`` deals them out.
    """

    method: Method
    layout: Layout
    mask: Mask
    heads: Heads

    # ------------------------------------------------------------------ programs
    def forward(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank in the forward pass; made once."""
        return self._made.get((rank, False)) or self._keep(rank, False)

    def backward(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank in the backward pass; made once.

        With ``ring`` and ``all_gather`` keys travel as in the forward pass. The gradients of a block go
        straight back to its owner, who adds them up in the order of its distance to the others.
        """
        return self._made.get((rank, True)) or self._keep(rank, True)

    @cached_property
    def _made(self) -> dict[tuple[int, bool], tuple[Step, ...]]:
        return {}

    def _keep(self, rank: int, backward: bool) -> tuple[Step, ...]:
        steps = self._backward(rank) if backward else self._forward(rank)
        self._made[rank, backward] = steps
        return steps

    def _forward(self, rank: int) -> tuple[Step, ...]:
        if self.method == "ulysses":
            return self._over_heads(rank, "qkv", "out")
        distances = self._distances
        steps = []
        block: tuple[Part, ...] = (Part(rank, range(self.layout.lengths[rank])),)
        for following in [*distances, ()]:
            sends, receives = self._exchange(rank, following)
            steps.append(Step(sends, receives, block, self._tiles(rank, block)))
            block = self._block(receives)
        return tuple(steps)

    def _backward(self, rank: int) -> tuple[Step, ...]:
        if self.method == "ulysses":
            return self._over_heads(rank, "dout", "dqkv")
        steps = list(self.forward(rank))
        found = []
        for number, step in enumerate([*steps, Step()]):
            # What came in a step was computed on in the next, and goes back in the one behind that.
            earlier = steps[number - 2] if number > 1 else Step()
            back = tuple(_back(m) for m in earlier.receives)
            returned = tuple(_back(m) for m in earlier.sends)
            found.append(Step(step.sends + back, step.receives + returned, step.block, step.tiles))
        return tuple(found)

    @cached_property
    def _distances(self) -> list[tuple[int, ...]]:
        """The distances to the owners whose keys come in each exchange."""
        others = range(1, self.layout.world)
        return [tuple(others)] if self.method == "all_gather" else [(d,) for d in others]

    def _exchange(
        self, rank: int, distances: tuple[int, ...]
    ) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        world = self.layout.world
        sends = (self._keys(rank, (rank + d) % world) for d in distances)
        receives = (self._keys((rank - d) % world, rank) for d in distances)
        return tuple(m for m in sends if m), tuple(m for m in receives if m)

    def _keys(self, owner: int, target: int) -> Message | None:
        """The keys of ``owner`` between the first and the last of each piece that ``target`` sees."""
        rows = seen_rows(self._pieces[owner], self._pieces[target], self.mask)
        return Message(owner, target, "kv", rows, owner) if rows else None

    def _block(self, receives: tuple[Message, ...]) -> tuple[Part, ...]:
        """The received rows; those of several owners by their positions, which makes fewer, larger tiles."""
        parts = [Part(m.owner, rows) for m in receives for rows in m.rows]
        if len(receives) > 1:
            split = [
                (piece.positions[0], Part(part.owner, piece.rows))
                for part in parts
                for piece in self._within(part)
            ]
            parts = [part for _, part in sorted(split)]
        return tuple(parts)

    def _within(self, part: Part) -> list[Piece]:
        """The pieces that some rows of an owner consist of."""
        found = []
        for piece in self._pieces[part.owner]:
            first = max(piece.rows.start, part.rows.start) - piece.rows.start
            last = min(piece.rows.stop, part.rows.stop) - piece.rows.start
            if first < last:
                found.append(t.cut(piece, first, last))
        return found

    def _tiles(self, rank: int, block: tuple[Part, ...]) -> tuple[Tile, ...]:
        keys = []
        begin = 0
        for part in block:
            shift = begin - part.rows.start
            for piece in self._within(part):
                rows = range(piece.rows.start + shift, piece.rows.stop + shift)
                keys.append(piece._replace(rows=rows))
            begin += len(part.rows)
        return t.tiles_of(self._pieces[rank], t.joined(keys), self.mask)

    @cached_property
    def _pieces(self) -> list[list[Piece]]:
        return [pieces_of(self.layout, rank) for rank in range(self.layout.world)]

    # ------------------------------------------------------------------ heads
    def heads_of(self, rank: int) -> tuple[int, int]:
        """(first, last) of the query heads that a rank computes with ``ulysses``, as equal as can be.

        Where every rank gets whole groups of them, a key head is on one rank alone.
        """
        world, unit = self.layout.world, 1
        if self.heads.kv and self.heads.kv % world == 0:
            unit = self.heads.group
        size, longer = divmod(self.heads.q // unit, world)
        first = size * rank + min(rank, longer)
        return unit * first, unit * (first + size + (rank < longer))

    def heads_kv_of(self, rank: int) -> tuple[int, int]:
        """(first, last) of the key heads that these read."""
        first, last = self.heads_of(rank)
        group = self.heads.group
        return (first // group, -(-last // group)) if first < last else (0, 0)

    def _over_heads(self, rank: int, there: Payload, back: Payload) -> tuple[Step, ...]:
        world = range(self.layout.world)
        sends = (self._of_heads(rank, other, there, rank, other) for other in world)
        receives = (self._of_heads(other, rank, there, other, rank) for other in world)
        returned = (self._of_heads(rank, other, back, other, rank) for other in world)
        results = (self._of_heads(other, rank, back, rank, other) for other in world)
        whole = Piece(range(self.layout.total), range(self.layout.total))
        documents = split_documents(whole, self.layout)
        tiles = []
        if self.heads_of(rank)[0] < self.heads_of(rank)[1]:
            for tile in t.tiles_of(documents, documents, self.mask):
                tiles += [
                    Tile(tile.q, tile.k, tile.low, tile.high, heads, heads_kv)
                    for heads, heads_kv in self._even_groups(rank)
                ]
        return (
            Step(tuple(m for m in sends if m), tuple(m for m in receives if m)),
            Step(tiles=tuple(tiles)),
            Step(tuple(m for m in returned if m), tuple(m for m in results if m)),
        )

    def _of_heads(
        self, source: int, target: int, payload: Payload, owner: int, computing: int
    ) -> Message | None:
        """Rows of ``owner`` for the heads of ``computing``; a rank sends itself nothing."""
        heads, rows = self.heads_of(computing), self.layout.lengths[owner]
        if source == target or not rows or heads[0] == heads[1]:
            return None
        return Message(source, target, payload, (range(rows),), owner, heads, self.heads_kv_of(computing))

    def _even_groups(self, rank: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """The heads of a rank, counted within it, as ranges of which every key head serves equally many."""
        first, last = self.heads_of(rank)
        first_kv, group = self.heads_kv_of(rank)[0], self.heads.group
        head = first
        while head < last:
            if head % group == 0 and head + group <= last:
                end = head + (last - head) // group * group
            else:  # a part of one group
                end = min(last, (head // group + 1) * group)
            heads_kv = (head // group - first_kv, -(-end // group) - first_kv)
            yield (head - first, end - first), heads_kv
            head = end


def _back(message: Message) -> Message:
    return Message(message.target, message.source, "dkv", message.rows, message.owner)


# ---------------------------------------------------------------------- rows and what sees them
def pieces_of(layout: Layout, rank: int) -> list[Piece]:
    """The rows of a rank as pieces, each of one document."""
    found: list[Piece] = []
    begin = 0
    for run in layout.ranks[rank]:
        found += split_documents(Piece(range(begin, begin + len(run)), run), layout)
        begin += len(run)
    return found


def split_documents(piece: Piece, layout: Layout) -> list[Piece]:
    """A piece cut where documents end."""
    if layout.documents is None or not piece.rows:
        return [piece] if piece.rows else []
    found = []
    first, positions = 0, piece.positions
    while first < len(positions):
        document = layout.document(positions[first])
        end = layout.documents[document + 1]
        last = min(len(positions), first + -(-(end - positions[first]) // positions.step))
        found.append(t.cut(piece, first, last)._replace(document=document))
        first = last
    return found


def seen_rows(keys: list[Piece], queries: list[Piece], mask: Mask) -> tuple[range, ...]:
    """Rows of keys: from each piece what lies between the keys that some query piece sees, merged."""
    found: list[range] = []
    by_document = t.of_documents(queries)
    for k in keys:
        seen = [t.seen_by(q, k, mask) for q in by_document.get(k.document, ())]
        for rows in sorted((r for r in seen if r), key=lambda r: (r.start, r.stop)):
            if found and found[-1].start <= rows.start <= found[-1].stop:
                rows = range(found[-1].start, max(found.pop().stop, rows.stop))
            found.append(rows)
    return tuple(found)
