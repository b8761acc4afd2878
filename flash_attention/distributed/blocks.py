"""Rows of several ranks in one block, and the memory by which messages bring or take them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attention.distributed.copies import contiguous, copy
from flash_attention.distributed.places import rows_of
from flash_attention.distributed.schedule import Message, Part
from flash_attention.distributed.transport import Parcel

MOST_RANGES = 4
"""So many ranges of rows of a message travel each by itself, straight to their places; more in one piece."""

Views = Sequence[tuple[Tensor, ...]]  # of each range of rows of a message the tensors


class Places:
    """Where some parts lie that follow one another."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._rows: dict[Part, range] = {}
        begin = 0
        for part in parts:
            end = begin + len(part.rows)
            self._rows[part] = range(begin, end)
            begin = end

    def rows(self, part: Part) -> range:
        """The rows of one of them."""
        return self._rows[part]


class Block:
    """Tensors (batch, rows, heads, d) whose rows are some parts, one behind the other."""

    def __init__(self, parts: Sequence[Part], tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        self._places = Places(parts)

    def views(self, owner: int, ranges: Iterable[range]) -> Views:
        """The rows of some parts of an owner."""
        places = [rows_of(self._places.rows(Part(owner, rows))) for rows in ranges]
        return [tuple(x[:, place] for x in self.tensors) for place in places]


def own_views(tensors: Sequence[Tensor], message: Message, heads: slice) -> Views:
    """The rows and heads of a message in the tensors of a rank's own rows."""
    return [tuple(x[:, rows_of(rows), heads] for x in tensors) for rows in message.rows]


def packed(message: Message, views: Views) -> Parcel:
    """A message that takes these rows."""
    if len(views) > MOST_RANGES:
        return Parcel(message, tuple(torch.cat(list(of_all), 1) for of_all in zip(*views, strict=True)))
    return Parcel(message, tuple(contiguous(x) for of_range in views for x in of_range))


class Arrival(NamedTuple):
    """A message that comes, and where its rows belong."""

    parcel: Parcel
    views: Views

    @classmethod
    def of(cls, message: Message, views: Views) -> Arrival:
        """With memory for what cannot come straight to its place."""
        if len(views) > MOST_RANGES:
            rooms = [x.new_empty((x.shape[0], message.count, *x.shape[2:])) for x in views[0]]
        else:
            rooms = [x if x.is_contiguous() else x.new_empty(x.shape) for of_range in views for x in of_range]
        return cls(Parcel(message, tuple(rooms)), views)

    def put(self) -> None:
        """Brings the rows to their places, once the message has come."""
        rooms = self.parcel.tensors
        places = [x for of_range in self.views for x in of_range]
        if len(self.views) > MOST_RANGES:
            lengths = [of_range[0].shape[1] for of_range in self.views]
            split = zip(*(x.split(lengths, 1) for x in rooms), strict=True)
            rooms = tuple(piece for of_range in split for piece in of_range)
        for place, came in zip(places, rooms, strict=True):
            if place is not came:
                copy(place, came)
