"""Which keys a mask function of Transformers lets a query see, read by calling it once with symbols.

A mask function answers for one pair of places: ``mask_function(batch, head, query, key) -> bool``. Most of
them compare the two places and do nothing else. Called with symbols in place of numbers, such a function
returns the band of keys that it allows, whatever it is built of. A function that does more with a symbol, for
example looks it up in a tensor, is unreadable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class UnreadableError(Exception):
    """The mask function depends on more than the distance of key and query."""


@dataclass(frozen=True)
class Band:
    """A query at place i sees the keys at the places i - left to i + right; None: no limit."""

    left: int | None = None
    right: int | None = None

    @property
    def has_limits(self) -> bool:
        return self.left is not None or self.right is not None


CAUSAL = Band(right=0)
EVERYTHING = Band()


def read_band(mask_function: Callable[..., Any]) -> Band:
    """The band that ``mask_function`` allows.

    Raises:
        UnreadableError: the function is none of a band.
    """
    try:
        answer = mask_function(_Place(), _Place(), _Place(query=1), _Place(key=1))
    except UnreadableError:
        raise
    except Exception as error:  # whatever a function does that was written for tensors
        raise UnreadableError(str(error)) from error
    if not isinstance(answer, _Distances) or answer.low > 0 or answer.high < 0:
        raise UnreadableError("no band around the query's own place")
    left = None if answer.low == -math.inf else -int(answer.low)
    right = None if answer.high == math.inf else int(answer.high)
    return Band(left, right)


class _Distances:
    """The distances key - query from low to high: what a comparison of places allows; low > high: none."""

    device = None

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def to(self, *_: Any, **__: Any) -> _Distances:
        return self

    def __and__(self, other: _Distances) -> _Distances:
        return _Distances(max(self.low, other.low), min(self.high, other.high))

    def __or__(self, other: _Distances) -> _Distances:
        if self.low > self.high:
            return other
        if other.low > other.high:
            return self
        if self.low > other.high + 1 or other.low > self.high + 1:
            raise UnreadableError("two bands with a gap between them")
        return _Distances(min(self.low, other.low), max(self.high, other.high))

    def __bool__(self) -> bool:
        raise UnreadableError("a branch that depends on the places")


class _Place:
    """``query`` times the query's place, plus ``key`` times the key's place, plus ``offset``."""

    device = None

    def __init__(self, query: int = 0, key: int = 0, offset: int = 0) -> None:
        self.query, self.key, self.offset = query, key, offset

    def new_ones(self, *_: Any, **__: Any) -> _Distances:
        return _Distances(-math.inf, math.inf)

    def new_zeros(self, *_: Any, **__: Any) -> _Distances:
        return _Distances(1, 0)

    def __neg__(self) -> _Place:
        return _Place(-self.query, -self.key, -self.offset)

    def __add__(self, other: _Place | int) -> _Place:
        if not isinstance(other, _Place):
            other = _Place(offset=_whole(other))
        return _Place(self.query + other.query, self.key + other.key, self.offset + other.offset)

    __radd__ = __add__

    def __sub__(self, other: _Place | int) -> _Place:
        return self + (-other)

    def __rsub__(self, other: int) -> _Place:
        return -self + other

    def __abs__(self) -> _AbsoluteDistance:
        _at_least_zero(self)  # refuse what is no distance
        return _AbsoluteDistance(self)

    def __ge__(self, other: _Place | int) -> _Distances:
        return _at_least_zero(self - other)

    def __gt__(self, other: _Place | int) -> _Distances:
        return _at_least_zero(self - other - 1)

    def __le__(self, other: _Place | int) -> _Distances:
        return _at_least_zero(-(self - other))

    def __lt__(self, other: _Place | int) -> _Distances:
        return _at_least_zero(-(self - other) - 1)

    def __eq__(self, other: object) -> _Distances:  # type: ignore[override]
        raise UnreadableError("a comparison for equality")

    __ne__ = __eq__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise UnreadableError("a branch that depends on the places")


class _AbsoluteDistance:
    def __init__(self, distance: _Place) -> None:
        self.distance = distance

    def __le__(self, limit: int) -> _Distances:
        return (self.distance <= limit) & (-self.distance <= limit)

    def __lt__(self, limit: int) -> _Distances:
        return self <= limit - 1


def _whole(number: Any) -> int:
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    raise UnreadableError(f"{number!r} is added to a place")


def _at_least_zero(place: _Place) -> _Distances:
    """The distances at which ``place`` is at least 0."""
    everything = _Distances(-math.inf, math.inf)
    if place.query == -1 and place.key == 1:
        return _Distances(-place.offset, math.inf)
    if place.query == 1 and place.key == -1:
        return _Distances(-math.inf, place.offset)
    if place.query >= 0 and place.key >= 0 and place.offset >= 0:  # places are never negative
        return everything
    raise UnreadableError("a comparison with a fixed place")
