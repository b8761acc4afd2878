"""``Sums``: gradients of the same rows from several shares, added up in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attention.distributed.places import Heads, Place, rows_of


class _Region(NamedTuple):
    """A place and one or two terms of its sum, in their order; each is a tensor for each of the gradients."""

    place: Place
    terms: tuple[tuple[Tensor, ...], ...]


class Sums:
    """Sums of gradients (batch, rows, heads, d), in the order in which their shares come.

    A share is kept as it is until another one comes for the same elements, and what is written at the end is
    the sum of the last two: nothing is cleared, converted or copied before. Shares that are float32 are
    written to.

    Args:
        rows: of the whole.
        heads: likewise.
    """

    def __init__(self, rows: int, heads: int) -> None:
        self._whole = Place((0, rows), (0, heads))
        self._regions: list[_Region] = []  # no two have an element in common
        self._solid: tuple[Tensor, ...] | None = None  # float32 sums of all, once rows have come in strides

    @property
    def begun(self) -> bool:
        """Whether a share has come."""
        return self._solid is not None or bool(self._regions)

    def add(self, share: Sequence[Tensor], rows: range, heads: Heads | None = None) -> None:
        """Adds a share of some rows and heads; None: all heads."""
        heads = heads or self._whole.heads
        if self._solid is None and rows.step != 1 and len(rows) > 1:
            self._make_solid(share)
        if self._solid is not None:
            for x, y in zip(self._solid, share, strict=True):
                x[:, rows_of(rows), slice(*heads)].add_(y)
        elif rows and heads[0] < heads[1]:
            self._add(Place((rows[0], rows[-1] + 1), heads), tuple(share))

    def _add(self, place: Place, share: tuple[Tensor, ...]) -> None:
        left = [place]  # of the share: what no region has yet
        regions = []
        for region in self._regions:
            common = region.place.common(place)
            if common is None:
                regions.append(region)
                continue
            for part in region.place.without(common):
                regions.append(_Region(part, _views(region.terms, part, region.place)))
            both = _views(region.terms, common, region.place), _views((share,), common, place)
            regions.append(_Region(common, _added(both[0], both[1][0])))
            left = [part for piece in left for part in piece.without(common)]
        regions += [_Region(part, _views((share,), part, place)) for part in left]
        self._regions = regions

    def move(self, rows: range, other: Sums, to: range, heads: Heads | None = None) -> None:
        """Gives the sums of some rows, which follow one another, to others; they end here.

        Args:
            rows: of these sums.
            other: which gets them.
            to: as many rows of the other, in their order.
            heads: those of the other that all of these are; None: all.
        """
        base = heads[0] if heads else 0
        place = Place((rows.start, rows.stop), self._whole.heads)
        if self._solid is not None:
            other.add([x[:, rows_of(rows)] for x in self._solid], to, heads)
            return
        for region in self._regions:
            common = region.place.common(place)
            if common is not None:
                of_rows = to[common.rows[0] - rows.start : common.rows[1] - rows.start]
                of_heads = common.heads[0] + base, common.heads[1] + base
                for term in _views(region.terms, common, region.place):
                    other.add(term, of_rows, of_heads)

    def write(self, targets: Sequence[Tensor], rows: range | None = None) -> None:
        """Writes the sums of some rows that follow one another, or of all; 0 where no share has come."""
        first, last = (rows.start, rows.stop) if rows is not None else self._whole.rows
        place = Place((first, last), self._whole.heads)
        if self._solid is not None:
            for x, target in zip(self._solid, targets, strict=True):
                target.copy_(x[:, first:last])
            return
        found = [(region, region.place.common(place)) for region in self._regions]
        if sum(common.size for _, common in found if common) < place.size:
            for target in targets:
                target.zero_()
        for region, common in found:
            if common is not None:
                terms = _views(region.terms, common, region.place)
                for target, *of_target in zip(targets, *terms, strict=True):
                    _write_sum(common.of(target, place), of_target)

    def _make_solid(self, like: Sequence[Tensor]) -> None:
        rows, heads = self._whole.rows[1], self._whole.heads[1]
        shapes = [(x.shape[0], rows, heads, x.shape[3]) for x in like]
        sums = tuple(
            torch.empty(shape, dtype=torch.float32, device=x.device)
            for x, shape in zip(like, shapes, strict=True)
        )
        self.write(sums)
        self._solid, self._regions = sums, []


# ---------------------------------------------------------------------- terms
def _views(
    terms: tuple[tuple[Tensor, ...], ...], part: Place, origin: Place
) -> tuple[tuple[Tensor, ...], ...]:
    return tuple(tuple(part.of(x, origin) for x in term) for term in terms)


def _added(
    terms: tuple[tuple[Tensor, ...], ...], share: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], ...]:
    """Terms with one more: never more than two, of which the first is then the sum of those before."""
    if len(terms) < 2:
        return (*terms, share)
    return (tuple(_sum(a, b) for a, b in zip(*terms, strict=True)), share)


def _sum(a: Tensor, b: Tensor) -> Tensor:
    """In float32, in place where it can be."""
    for x, y in ((a, b), (b, a)):
        if x.dtype is torch.float32:
            return x.add_(y)
    return a.float().add_(b)


def _write_sum(target: Tensor, terms: Sequence[Tensor]) -> None:
    """The sum of one or two tensors, rounded once."""
    if len(terms) == 1:
        if target.data_ptr() != terms[0].data_ptr() or target.dtype is not terms[0].dtype:
            target.copy_(terms[0])
        return
    a, b = terms
    if target.dtype is torch.float32 and torch.float32 not in (a.dtype, b.dtype):
        a = a.float()  # else the sum would be of the type of both
    torch.add(a, b, out=target)
