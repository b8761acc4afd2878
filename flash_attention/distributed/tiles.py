"""Which pairs of rows one call of attention computes: a tile is a rectangle with a band of visible keys.

Rows are described by pieces: some rows of a buffer that lie one behind the other, and the positions that they
have in the sequence, which grow by one step. Between two pieces of one step the keys that a query sees form a
band: key j of the tile is visible to its query i when ``low <= j - i <= high``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

from flash_attention.call import Mask

MOST_TILES = 4096
"""More tiles of one step than this are refused: each is a call of a kernel."""


class Piece(NamedTuple):
    """Rows of a buffer and their positions.

    Attributes:
        rows: where they lie in the buffer.
        positions: where they lie in the sequence, as many.
        document: which document they belong to.
    """

    rows: range
    positions: range
    document: int = 0


@dataclass(frozen=True)
class Tile:
    """One call of attention: some queries, some keys, and which of these each query sees.

    Attributes:
        q: rows of the queries in their buffer.
        k: rows of the keys in their buffer.
        low: key j is visible to query i of the tile if j - i is at least this; None: no limit.
        high: likewise at most; None: no limit.
        heads: (first, last) of the query heads of their buffer; None: all.
        heads_kv: likewise of the key heads.
        positions: of the queries and of the keys in the sequence; None: nobody asks for them.
    """

    q: range
    k: range
    low: int | None = None
    high: int | None = None
    heads: tuple[int, int] | None = None
    heads_kv: tuple[int, int] | None = None
    positions: tuple[range, range] | None = None

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key are visible."""
        n, m = len(self.q), len(self.k)
        below = _pairs_up_to(n, m, m if self.high is None else self.high)
        return below - (0 if self.low is None else _pairs_up_to(n, m, self.low - 1))


class Coverage(NamedTuple):
    """What the tiles of a rank leave of its queries.

    Attributes:
        once: no query is in two tiles of one head: the result of a tile is final.
        everything: every query is in a tile of every head.
    """

    once: bool
    everything: bool


def coverage(tiles: Iterable[Tile], rows: int, n_heads: int) -> Coverage:
    """That of some tiles, where queries have so many rows and heads."""
    everywhere = (0, n_heads)
    counted: dict[tuple[tuple[int, int], range], int] = {}
    for tile in tiles:
        place = (tile.heads or everywhere, tile.q)
        counted[place] = counted.get(place, 0) + 1
    if any(number > 1 for number in counted.values()) or _any_overlap(list(counted)):
        return Coverage(False, False)
    filled = sum((heads[1] - heads[0]) * len(q) for heads, q in counted)
    return Coverage(True, filled == rows * n_heads)


def _any_overlap(places: list[tuple[tuple[int, int], range]]) -> bool:
    """Whether two of some (heads, queries) may have a query of a head in common."""
    places.sort(key=lambda place: (place[1].start, place[1].stop))
    behind: list[tuple[tuple[int, int], range]] = []  # those that reach behind the latest one's start
    for heads, q in places:
        behind = [place for place in behind if place[1].stop > q.start]
        if any(heads[0] < others[1] and others[0] < heads[1] for others, _ in behind):
            return True
        behind.append((heads, q))
    return False


def _pairs_up_to(n: int, m: int, high: int) -> int:
    """Pairs (i < n, j < m) with j - i <= high: query i has high + i + 1 of them, at least 0 and at most m."""
    begin = min(n, max(0, -high))
    full = min(n, max(begin, m - high - 1))
    rising = (high + 1 + begin + high + full) * (full - begin) // 2
    return rising + (n - full) * m


# ---------------------------------------------------------------------- pieces
def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces that go on where one ends, in rows and positions, as one."""
    found: list[Piece] = []
    for piece in pieces:
        if found and _goes_on(found[-1], piece):
            last = found.pop()
            step = last.positions.step if len(last.positions) > 1 else _gap(last, piece)
            positions = range(last.positions.start, piece.positions[-1] + 1, step)
            piece = Piece(range(last.rows.start, piece.rows.stop), positions, piece.document)
        found.append(piece)
    return found


def _gap(first: Piece, second: Piece) -> int:
    return second.positions[0] - first.positions[-1]


def _goes_on(first: Piece, second: Piece) -> bool:
    if first.document != second.document or first.rows.stop != second.rows.start:
        return False
    gap = _gap(first, second)
    return gap == 1 and all(len(p.positions) == 1 or p.positions.step == 1 for p in (first, second))


def cut(piece: Piece, first: int, last: int) -> Piece:
    """Its rows from ``first`` to before ``last``, counted from its own first."""
    return Piece(piece.rows[first:last], piece.positions[first:last], piece.document)


def of_documents(pieces: Iterable[Piece]) -> dict[int, list[Piece]]:
    """The pieces of each document, in their order."""
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.document, []).append(piece)
    return found


# ---------------------------------------------------------------------- visibility
def seen_by(q: Piece, k: Piece, mask: Mask) -> range | None:
    """The rows from the first to the last of k that a query of q sees; None: there is none."""
    tiles = [_tile(one_q, one_k, mask) for one_q, one_k in _of_one_step(q, k)]
    rows = [tile.k for tile in tiles if tile is not None]
    return range(min(r[0] for r in rows), max(r[-1] for r in rows) + 1) if rows else None


def seeing(q: Piece, keys: Iterable[Piece], mask: Mask) -> range | None:
    """Which of its queries, counted within q, see a key of these pieces: from the first to the last."""
    found: list[tuple[int, int]] = []
    for k in keys:
        for one_q, one_k in _of_one_step(q, k):
            tile = _tile(one_q, one_k, mask)
            if tile is not None:
                found.append((tile.q[0] - q.rows[0], tile.q[-1] + 1 - q.rows[0]))
    return range(min(a for a, _ in found), max(b for _, b in found)) if found else None


def tiles_of(
    queries: Sequence[Piece], keys: Sequence[Piece], mask: Mask, positions: bool = False
) -> tuple[Tile, ...]:
    """The tiles that compute every visible pair of these queries and keys, each once, in a fixed order.

    Where positions are wanted, those of a tile grow by one step.
    """
    found: list[Tile] = []
    by_document = of_documents(keys)
    for q in queries:
        row: list[Tile] = []
        for k in by_document.get(q.document, ()):
            for one_q, one_k in _of_one_step(q, k):
                tile = _tile(one_q, one_k, mask, positions)
                if tile is not None:
                    row.append(tile)
        found += _joined_keys(row)
        if len(found) > MOST_TILES:
            raise NotImplementedError(
                f"this layout splits the work of one rank into more than {MOST_TILES} calls, since its rows "
                "do not lie in long runs of positions; use Layout.zigzag, contiguous, striped or per_document"
            )
    return tuple(_joined_queries(found))


def _of_one_step(q: Piece, k: Piece) -> list[tuple[Piece, Piece]]:
    """Parts of both whose positions grow by the same step."""
    steps = [p.positions.step for p in (q, k) if len(p.positions) > 1]
    if not steps or all(step == steps[0] for step in steps):
        return [(q, k)]
    step = lcm(*steps)
    return [(a, b) for a in _strided(q, step) for b in _strided(k, step)]


def _strided(piece: Piece, step: int) -> list[Piece]:
    if len(piece.positions) == 1:
        return [piece]
    every = step // piece.positions.step
    return [
        Piece(piece.rows[first::every], piece.positions[first::every], piece.document)
        for first in range(min(every, len(piece.rows)))
    ]


def _tile(q: Piece, k: Piece, mask: Mask, positions: bool = False) -> Tile | None:
    """The visible part of two pieces of one step; None: there is none."""
    step = max(p.positions.step if len(p.positions) > 1 else 1 for p in (q, k))
    distance = q.positions[0] - k.positions[0]
    low = None if mask.left is None else -((mask.left - distance) // step)
    high = None if mask.right is None else (distance + mask.right) // step
    if low is not None and high is not None and low > high:
        return None
    n, m = len(q.rows), len(k.rows)
    # Queries that see a key, then keys that one of them sees.
    i0 = 0 if high is None else max(0, -high)
    i1 = n if low is None else min(n, m - low)
    if i0 >= i1:
        return None
    j0 = 0 if low is None else max(0, i0 + low)
    j1 = m if high is None else min(m, i1 + high)
    if j0 >= j1:
        return None
    places = (q.positions[i0:i1], k.positions[j0:j1]) if positions else None
    return _banded(Tile(q.rows[i0:i1], k.rows[j0:j1], positions=places), low, high, i0 - j0)


def _banded(tile: Tile, low: int | None, high: int | None, shift: int) -> Tile:
    """The tile with limits that hide something; others are None."""
    n, m = len(tile.q), len(tile.k)
    low = None if low is None or low + shift <= 1 - n else low + shift
    high = None if high is None or high + shift >= m - 1 else high + shift
    return replace(tile, low=low, high=high)


# ---------------------------------------------------------------------- fewer, larger tiles
def _joined_keys(tiles: list[Tile]) -> list[Tile]:
    """Tiles of equal queries whose keys lie side by side become one where that is a band as well."""
    found: list[Tile] = []
    for tile in tiles:
        both = _side_by_side(found[-1], tile) if found else None
        if both is not None:
            found[-1] = both
        else:
            found.append(tile)
    return found


def _side_by_side(a: Tile, b: Tile) -> Tile | None:
    if a.q != b.q or not _touch(a.k, b.k) or a.high is not None or b.low is not None:
        return None
    n, before = len(a.q), len(a.k)
    # No limit of one may hide anything of the other.
    if (b.high is not None and b.high < -1) or (a.low is not None and a.low > before - n + 1):
        return None
    high = None if b.high is None else b.high + before
    positions = None
    if a.positions is not None and b.positions is not None:
        keys = _in_one(a.positions[1], b.positions[1])
        if keys is None:
            return None
        positions = a.positions[0], keys
    return _banded(Tile(a.q, range(a.k.start, b.k.stop), positions=positions), a.low, high, 0)


def _joined_queries(tiles: list[Tile]) -> list[Tile]:
    """Likewise tiles of equal keys whose queries lie one behind the other."""
    found: list[Tile] = []
    last_of: dict[range, int] = {}  # the place of the latest tile of these keys
    for tile in tiles:
        place = last_of.get(tile.k)
        both = None if place is None else _one_behind_the_other(found[place], tile)
        if place is not None and both is not None:
            found[place] = both
        else:
            last_of[tile.k] = len(found)
            found.append(tile)
    return found


def _one_behind_the_other(a: Tile, b: Tile) -> Tile | None:
    if a.k != b.k or not _touch(a.q, b.q) or a.low is not None or b.high is not None:
        return None
    before, m = len(a.q), len(a.k)
    if (b.low is not None and b.low > 1) or (a.high is not None and a.high + before < m - 1):
        return None
    low = None if b.low is None else b.low - before
    positions = None
    if a.positions is not None and b.positions is not None:
        queries = _in_one(a.positions[0], b.positions[0])
        if queries is None:
            return None
        positions = queries, a.positions[1]
    return _banded(Tile(range(a.q.start, b.q.stop), a.k, positions=positions), low, a.high, 0)


def _touch(a: range, b: range) -> bool:
    return a.step == b.step == 1 and a.stop == b.start


def _in_one(a: range, b: range) -> range | None:
    """Two ranges one behind the other as one; None: they are none."""
    step = a.step if len(a) > 1 else b.step if len(b) > 1 else b[0] - a[0]
    if step < 1 or b[0] - a[-1] != step or any(len(r) > 1 and r.step != step for r in (a, b)):
        return None
    return range(a[0], b[-1] + 1, step)
