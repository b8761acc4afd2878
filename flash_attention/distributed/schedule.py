"""Schedules of context-parallel attention as data: who sends what when, and who computes which tiles.

A ``Schedule`` makes the program of each rank: steps, whose messages travel while their tiles are computed.
Nothing here knows tensors or processes, so that tests can run the programs of any number of ranks as a graph.

Three methods, in which a rank gets no row that none of its queries sees:

``all_gather``: a rank computes the queries that see its own keys alone while the others' keys travel, then
the rest, each query in one call with all the keys that it sees. Keys come in one exchange, or in two that
bring some heads each.
``ring``: in step i rank r computes on keys of rank r - i, while those of rank r - i - 1 travel. A block comes
straight from its owner, so that nobody forwards what he doesn't need.
``ulysses``: an exchange turns shards of the sequence into shards of the heads, and one turns the result back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from flash_attention.call import Mask
from flash_attention.distributed import heads as h
from flash_attention.distributed import tiles as t
from flash_attention.distributed.heads import Heads
from flash_attention.distributed.layout import Layout
from flash_attention.distributed.pieces import near_and_far, pieces_of, seen_rows, split_documents, within
from flash_attention.distributed.tiles import Coverage, Piece, Tile

__all__ = ["METHODS", "Heads", "Message", "Method", "Part", "Schedule", "Step"]

Method = Literal["all_gather", "ring", "ulysses"]
METHODS: tuple[Method, ...] = ("all_gather", "ring", "ulysses")
Payload = Literal["kv", "dkv", "qkv", "out", "dout", "dqkv"]


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

    def back(self) -> Message:
        """The message that brings the gradients of these keys back to their owner."""
        return replace(self, source=self.target, target=self.source, payload="dkv")


class Part(NamedTuple):
    """Some rows of an owner as they lie in a block of keys, one part behind the other.

    Of those that another rank sends, a part is one of the ranges of rows of its message.
    """

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
        heads_kv: (first, last) of the key heads that the block has; None: all.
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    block: tuple[Part, ...] = ()
    tiles: tuple[Tile, ...] = ()
    heads_kv: tuple[int, int] | None = None


@dataclass(frozen=True)
class Schedule:
    """One method for one layout and mask.

    Attributes:
        method: how keys and queries meet.
        layout: which rank holds which rows.
        mask: which keys a query sees, in positions of the sequence.
        heads: head counts; ``ulysses`` deals them out.
        positions: tiles say the positions of their rows, which functions of the user's count in.
    """

    method: Method
    layout: Layout
    mask: Mask
    heads: Heads
    positions: bool = False

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

    def coverage(self, rank: int) -> Coverage:
        """Whether each query of a rank is in one tile, and in any; the same in both passes."""
        found = self._covered.get(rank)
        if found is None:
            first, last = self.heads_of(rank) if self.method == "ulysses" else (0, self.heads.q)
            rows = self.layout.total if self.method == "ulysses" else self.layout.lengths[rank]
            tiles = (tile for step in self.forward(rank) for tile in step.tiles)
            found = self._covered[rank] = t.coverage(tiles, rows, last - first)
        return found

    @cached_property
    def _covered(self) -> dict[int, Coverage]:
        return {}

    @property
    def at_once(self) -> bool:
        """Whether the keys of all steps travel from the beginning: their memory is needed in any case."""
        return self.method == "all_gather"

    def _forward(self, rank: int) -> tuple[Step, ...]:
        if self.method == "ulysses":
            return self._over_heads(rank, "qkv", "out")
        if self.method == "all_gather":
            return self._gathering(rank, backward=False)
        steps = []
        block: tuple[Part, ...] = (Part(rank, range(self.layout.lengths[rank])),)
        for distance in [*range(1, self.layout.world), 0]:
            sends, receives = self._exchange(rank, [distance] if distance else [])
            steps.append(Step(sends, receives, block, self._tiles(self._pieces[rank], block)))
            block = tuple(Part(m.owner, rows) for m in receives for rows in m.rows)
        return tuple(steps)

    def _backward(self, rank: int) -> tuple[Step, ...]:
        if self.method == "ulysses":
            return self._over_heads(rank, "dout", "dqkv")
        ring = self.method == "ring"
        steps = list(self.forward(rank) if ring else self._gathering(rank, backward=True))
        found = []
        for number, step in enumerate([*steps, Step()]):
            # What came in a step was computed on in the next, and goes back in the one behind that.
            earlier = steps[number - 2] if number > 1 else Step()
            back = tuple(m.back() for m in earlier.receives)
            returned = tuple(m.back() for m in earlier.sends)
            found.append(replace(step, sends=step.sends + back, receives=step.receives + returned))
        return tuple(found)

    def _gathering(self, rank: int, backward: bool) -> tuple[Step, ...]:
        """First the queries that see own keys alone; then for each part of the heads the others."""
        sends, receives = self._exchange(rank, range(1, self.layout.world))
        near, far = self._near_and_far(rank, receives)
        own = (Part(rank, range(self.layout.lengths[rank])),)
        seen_own = seen_rows(self._pieces[rank], far, self.mask)
        brought = [Part(m.owner, rows) for m in receives for rows in m.rows]
        block = self._in_order([*brought, *(Part(rank, rows) for rows in seen_own)])
        tiles = self._tiles(far, block)
        steps = [Step(block=own, tiles=self._tiles(near, own))]
        for part in self._parts[backward]:
            last = steps.pop()
            steps += [
                replace(last, sends=_of_part(sends, part), receives=_of_part(receives, part)),
                Step((), (), block, tuple(_of_query_heads(tile, part, self.heads) for tile in tiles), part),
            ]
        return tuple(steps)

    def _near_and_far(self, rank: int, receives: tuple[Message, ...]) -> tuple[list[Piece], list[Piece]]:
        """The queries that see own keys alone, and those that see some of these, too."""
        brought = [Part(m.owner, rows) for m in receives for rows in m.rows]
        others = [piece for part in brought for piece in self._within(part)]
        return near_and_far(self._pieces[rank], others, self.mask)

    @cached_property
    def _parts(self) -> tuple[tuple[tuple[int, int] | None, ...], ...]:
        """The parts of the heads by which ``all_gather`` sends keys, of the forward and the backward pass.

        Equal on all ranks. Where the first, the middle and the last one have queries that they can compute
        meanwhile, one exchange it is.
        """
        world = self.layout.world
        ranks = {0, world // 2, world - 1}
        waits = any(
            far and not near
            for near, far in (
                self._near_and_far(rank, self._exchange(rank, range(1, world))[1]) for rank in ranks
            )
        )
        if not waits:
            return (None,), (None,)
        pieces = max(1, sum(map(len, self._pieces)))
        queries, keys = self.layout.total // pieces, self.layout.total
        if self.layout.documents is not None:
            keys //= max(1, len(self.layout.documents) - 1)
        if self.mask.left is not None and self.mask.right is not None:
            keys = min(keys, queries + max(0, self.mask.left + self.mask.right))
        forward, backward = (h.parts_of_heads(self.heads, queries, keys, b) for b in (False, True))
        return forward, backward

    def _exchange(
        self, rank: int, distances: Iterable[int]
    ) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """What travels to and from the ranks at some distances."""
        world = self.layout.world
        distances = list(distances)
        sends = (self._keys(rank, (rank + d) % world) for d in distances)
        receives = (self._keys((rank - d) % world, rank) for d in distances)
        return tuple(m for m in sends if m), tuple(m for m in receives if m)

    def _keys(self, owner: int, target: int) -> Message | None:
        """The keys of ``owner`` between the first and the last of each piece that ``target`` sees."""
        rows = seen_rows(self._pieces[owner], self._pieces[target], self.mask)
        if self.method == "all_gather":  # by their positions they may lie apart
            rows = tuple(piece.rows for r in rows for piece in self._within(Part(owner, r)))
        return Message(owner, target, "kv", rows, owner) if rows else None

    def _in_order(self, parts: list[Part]) -> tuple[Part, ...]:
        """The pieces of some rows by their positions, which makes fewer, larger tiles."""
        split = [
            (piece.positions[0], Part(part.owner, piece.rows))
            for part in parts
            for piece in self._within(part)
        ]
        return tuple(part for _, part in sorted(split))

    def _within(self, part: Part) -> list[Piece]:
        return within(self._pieces[part.owner], part.rows)

    def _tiles(self, queries: list[Piece], block: tuple[Part, ...]) -> tuple[Tile, ...]:
        keys = []
        begin = 0
        for part in block:
            shift = begin - part.rows.start
            for piece in self._within(part):
                rows = range(piece.rows.start + shift, piece.rows.stop + shift)
                keys.append(piece._replace(rows=rows))
            begin += len(part.rows)
        return t.tiles_of(queries, t.joined(keys), self.mask, self.positions)

    @cached_property
    def _pieces(self) -> list[list[Piece]]:
        return [pieces_of(self.layout, rank) for rank in range(self.layout.world)]

    # ------------------------------------------------------------------ heads
    def heads_of(self, rank: int) -> tuple[int, int]:
        """(first, last) of the query heads that a rank computes with ``ulysses``, as equal as can be."""
        return h.dealt(self.heads, self.layout.world, rank)

    def heads_kv_of(self, rank: int) -> tuple[int, int]:
        """(first, last) of the key heads that these read."""
        return h.key_heads_of(self.heads, *self.heads_of(rank))

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
            for tile in t.tiles_of(documents, documents, self.mask, self.positions):
                tiles += [
                    replace(tile, heads=heads, heads_kv=heads_kv)
                    for heads, heads_kv in h.even_groups(self.heads, *self.heads_of(rank))
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


def _of_part(messages: tuple[Message, ...], part: tuple[int, int] | None) -> tuple[Message, ...]:
    return tuple(replace(message, heads_kv=part) for message in messages)


def _of_query_heads(tile: Tile, part: tuple[int, int] | None, heads: Heads) -> Tile:
    """A tile of the query heads that read a part of the key heads."""
    if part is None:
        return tile
    return replace(tile, heads=(part[0] * heads.group, part[1] * heads.group))
