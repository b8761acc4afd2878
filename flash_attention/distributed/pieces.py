"""The rows of a rank as pieces of one document and one step, and what other ranks see of them."""

from __future__ import annotations

from itertools import pairwise

from flash_attention.call import Mask
from flash_attention.distributed import tiles as t
from flash_attention.distributed.layout import Layout
from flash_attention.distributed.tiles import Piece


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


def within(pieces: list[Piece], rows: range) -> list[Piece]:
    """The pieces that some rows of an owner consist of."""
    found = []
    for piece in pieces:
        first = max(piece.rows.start, rows.start) - piece.rows.start
        last = min(piece.rows.stop, rows.stop) - piece.rows.start
        if first < last:
            found.append(t.cut(piece, first, last))
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


LEAST_NEAR = 4
"""Queries that are computed while keys travel are at least one of so many."""
BLOCK = 128  # queries of a thread block: pieces are cut at its multiples


def near_and_far(queries: list[Piece], others: list[Piece], mask: Mask) -> tuple[list[Piece], list[Piece]]:
    """The queries that see none of the others' keys, and those that do.

    Pieces are cut only where none of them is near as a whole, and much of them is near.
    """
    by_document = t.of_documents(others)
    seeing = [(q, t.seeing(q, by_document.get(q.document, ()), mask)) for q in queries]
    near = [q for q, far in seeing if far is None]
    if near:
        return near, [q for q, far in seeing if far is not None]
    near, rest = [], []
    for q, far in seeing:
        assert far is not None
        last = min(len(q.rows), -(-far.stop // BLOCK) * BLOCK)
        cuts = 0, far.start // BLOCK * BLOCK, last, len(q.rows)
        before, middle, behind = (t.cut(q, a, b) for a, b in pairwise(cuts))
        near += [piece for piece in (before, behind) if piece.rows]
        rest.append(middle)
    if LEAST_NEAR * sum(len(q.rows) for q in near) < sum(len(q.rows) for q in queries):
        return [], queries
    return near, rest
