"""Rows and heads of tensors (batch, rows, heads, d): how they are indexed, and rectangles of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

Heads = tuple[int, int]  # (first, last)


def rows_of(rows: range) -> slice:
    """A range of rows as an index, which makes a view."""
    return slice(rows.start, rows.stop, rows.step)


def heads_of(heads: Heads | None) -> slice:
    """Likewise (first, last) of the heads; None: all."""
    return slice(None) if heads is None else slice(*heads)


class Place(NamedTuple):
    """Rows that follow one another, of some heads."""

    rows: tuple[int, int]
    heads: Heads

    def common(self, other: Place) -> Place | None:
        """What both have; None: nothing."""
        rows = max(self.rows[0], other.rows[0]), min(self.rows[1], other.rows[1])
        heads = max(self.heads[0], other.heads[0]), min(self.heads[1], other.heads[1])
        return Place(rows, heads) if rows[0] < rows[1] and heads[0] < heads[1] else None

    def without(self, other: Place) -> Iterator[Place]:
        """What is left of it without another place, in rectangles."""
        part = self.common(other)
        if part is None:
            yield self
            return
        (first, last), (a, b) = self
        for rows in ((first, part.rows[0]), (part.rows[1], last)):
            if rows[0] < rows[1]:
                yield Place(rows, (a, b))
        for heads in ((a, part.heads[0]), (part.heads[1], b)):
            if heads[0] < heads[1]:
                yield Place(part.rows, heads)

    def of(self, x: Tensor, origin: Place) -> Tensor:
        """Its elements of a tensor whose first row and head are those of the origin."""
        first, head = origin.rows[0], origin.heads[0]
        return x[:, self.rows[0] - first : self.rows[1] - first, self.heads[0] - head : self.heads[1] - head]

    @property
    def size(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.heads[1] - self.heads[0])
