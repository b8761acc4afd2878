"""Interval arithmetic: between which bounds the values of a mod lie when its indices lie between given ones.

Bounds are exact or too wide, never too narrow. A real number has none. Bounds are arrays of NumPy: one
analysis is
made for many tiles at once. A bound at ``FAR`` or beyond means that there is none on that side; whole
numbers wrap
around at 64 bits, so that arithmetic with such an operand gives any number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flash_helpers.mods.mod import SMALL_NUMBER, Element, Mod, Node, Number
from flash_helpers.mods.operations import Kind

Bounds = NDArray[np.int64]
FAR = 2**61  # sums of two bounds stay within 64 bits
_RANGES = {
    Element.BOOL: (0, 1), Element.UINT8: (0, 255), Element.INT8: (-128, 127), Element.INT16: (-(2**15),
    2**15 - 1),
    Element.INT32: (-(2**31), 2**31 - 1),
}  # fmt: skip
LARGEST_INDEX = 2**30 - 1  # of batch items, heads, queries and keys
INDEX_RANGE = (0, LARGEST_INDEX)


class Interval(NamedTuple):
    """Lowest and highest value; both count as possible. Of bools, 0 is False and 1 is True."""

    low: Bounds
    high: Bounds

    @classmethod
    def of(cls, low: Any, high: Any) -> Interval:
        return cls(np.asarray(low, np.int64), np.asarray(high, np.int64))

    @property
    def in_32_bits(self) -> bool:
        """Whether 32 bits hold every value."""
        return int(self.low) >= -(2**31) and int(self.high) < 2**31


UNKNOWN = Interval.of(-FAR, FAR)
EITHER = Interval.of(0, 1)


def intervals(
    mod: Mod,
    indices: Mapping[str, Interval] | None = None,
    numbers: Sequence[int | float] | None = None,
) -> list[Interval]:
    """The interval of each node; of a real number ``UNKNOWN``.

    Args:
        mod: the mod.
        indices: bounds of b, h, q and k; those that are missing are any index.
        numbers: the captured numbers; None: any of their types.
    """
    found: list[Interval] = []
    loop_end = max([1, *(node.data for node in mod.nodes if node.op in _REDUCED)])
    for node in mod.nodes:
        args = [found[arg] for arg in node.args]
        found.append(_of_node(mod, node, args, indices or {}, numbers, loop_end))
    return found


def _of_node(
    mod: Mod,
    node: Node,
    args: list[Interval],
    indices: Mapping[str, Interval],
    numbers: Sequence[int | float] | None,
    loop_end: int,
) -> Interval:
    wide = EITHER if node.kind is Kind.BOOL else UNKNOWN
    if node.op in ("b", "h", "q", "k"):
        return indices.get(node.op) or Interval.of(*INDEX_RANGE)
    if node.kind is Kind.FLOAT:
        return UNKNOWN
    if node.op == "constant":
        return _exactly(node.data)
    if node.op == "loop":
        return Interval.of(0, loop_end - 1)
    if node.op == "number":
        if numbers is not None:
            return _exactly(numbers[node.data])
        small = mod.numbers[node.data] is Number.SMALL
        return Interval.of(-SMALL_NUMBER, SMALL_NUMBER) if small else UNKNOWN
    if node.op == "load":
        low, high = _RANGES.get(mod.tensors[node.data].element, (-FAR, FAR))
        return Interval.of(min(low, 0), max(high, 0))  # outside of the tensor it is 0
    if node.op in ("any", "all") and node.data > 0:
        return args[0]  # of one value for all of ``loop``
    if node.op in ("largest", "smallest") and node.data > 0:
        return args[0]
    if any(mod.nodes[arg].kind is Kind.FLOAT for arg in node.args):
        return wide
    if node.op == "not":
        return _opposite(*args) if node.kind is Kind.BOOL else _complement(*args)
    if node.op in _RULES:
        return _RULES[node.op](*args)
    if node.op not in _ARITHMETIC:
        return wide
    bounds = _ARITHMETIC[node.op](*args)
    far = np.logical_or.reduce(
        np.broadcast_arrays(*((x.low <= -FAR) | (x.high >= FAR) for x in (*args, bounds)))
    )
    return Interval(np.where(far, -FAR, bounds.low), np.where(far, FAR, bounds.high)) if far.any() else bounds


def _exactly(value: int | float) -> Interval:
    return Interval.of(value, value) if abs(value) < FAR else UNKNOWN


_REDUCED = ("any", "all", "sum", "largest", "smallest")


# ---------------------------------------------------------------------- rules
def _corners(op: Callable[[Any, Any], Any], a: Interval, b: Interval) -> Interval:
    four = [op(x, y) for x in a for y in b]
    return Interval(
        np.minimum.reduce(np.broadcast_arrays(*four)), np.maximum.reduce(np.broadcast_arrays(*four))
    )


def _safe_product(x: Bounds, y: Bounds) -> Bounds:
    far = np.abs(x.astype(np.float64) * y.astype(np.float64)) >= FAR
    sign = np.where((x < 0) == (y < 0), FAR, -FAR)
    with np.errstate(over="ignore"):
        return np.where(far, sign, x * y)


def _multiply(a: Interval, b: Interval) -> Interval:
    return _corners(_safe_product, a, b)


def _where_divisible(a: Interval, b: Interval, rule: Callable[[Interval, Interval], Interval]) -> Interval:
    """A rule for divisors above 0; where the divisor may be 0 or less, nothing is known."""
    positive = b.low > 0
    b = Interval(np.where(positive, b.low, 1), np.where(positive, b.high, 1))
    found = rule(a, b)
    return Interval(np.where(positive, found.low, -FAR), np.where(positive, found.high, FAR))


def _floor_divide(a: Interval, b: Interval) -> Interval:
    return _where_divisible(a, b, lambda a, b: _corners(np.floor_divide, a, b))


def _remainder(a: Interval, b: Interval) -> Interval:
    def rule(a: Interval, b: Interval) -> Interval:
        same = (b.low == b.high) & (np.floor_divide(a.low, b.low) == np.floor_divide(a.high, b.low))
        untouched = (a.low >= 0) & (a.high < b.low)
        low = np.where(same, np.remainder(a.low, b.low), np.where(untouched, a.low, 0))
        high = np.where(
            same,
            np.remainder(a.high, b.low),
            np.where(untouched, a.high, np.where(b.high >= FAR, FAR, b.high - 1)),
        )
        return Interval(low, high)

    return _where_divisible(a, b, rule)


def _abs(a: Interval) -> Interval:
    low = np.where((a.low <= 0) & (a.high >= 0), 0, np.minimum(np.abs(a.low), np.abs(a.high)))
    return Interval(low, np.maximum(np.abs(a.low), np.abs(a.high)))


def _bits(x: Bounds) -> Bounds:
    """The smallest 2^n - 1 that is not below x >= 0."""
    for shift in (1, 2, 4, 8, 16, 32):
        x = x | (x >> shift)
    return x


def _and(a: Interval, b: Interval) -> Interval:
    some = (a.low >= 0) | (b.low >= 0)  # then the result is not negative, nor above that operand
    high = np.where(a.low < 0, b.high, np.where(b.low < 0, a.high, np.minimum(a.high, b.high)))
    both_bools = (a.low >= 0) & (b.low >= 0) & (a.high <= 1) & (b.high <= 1)
    low = np.where(both_bools, np.minimum(a.low, b.low), 0)
    return Interval(np.where(some, low, -FAR), np.where(some, high, FAR))


def _or(a: Interval, b: Interval) -> Interval:
    both = (a.low >= 0) & (b.low >= 0)
    high = _bits(np.maximum(np.maximum(a.high, b.high), 0))
    return Interval(np.where(both, np.maximum(a.low, b.low), -FAR), np.where(both, high, FAR))


def _xor(a: Interval, b: Interval) -> Interval:
    known = (a.low == a.high) & (b.low == b.high)
    exact = a.low ^ b.low
    both = (a.low >= 0) & (b.low >= 0)
    high = _bits(np.maximum(np.maximum(a.high, b.high), 0))
    return Interval(
        np.where(known, exact, np.where(both, 0, -FAR)), np.where(known, exact, np.where(both, high, FAR))
    )


def _shift_right(a: Interval, b: Interval) -> Interval:
    known = (b.low >= 0) & (b.high <= 62)
    count = Interval(np.clip(b.low, 0, 62), np.clip(b.high, 0, 62))
    found = _corners(np.right_shift, a, count)
    return Interval(np.where(known, found.low, -FAR), np.where(known, found.high, FAR))


def _shift_left(a: Interval, b: Interval) -> Interval:
    known = (b.low >= 0) & (b.high <= 61)
    one = np.int64(1)
    factor = Interval(one << np.clip(b.low, 0, 61), one << np.clip(b.high, 0, 61))
    found = _multiply(a, factor)
    return Interval(np.where(known, found.low, -FAR), np.where(known, found.high, FAR))


def _truth(always: Any, never: Any) -> Interval:
    return Interval(np.where(always, 1, 0).astype(np.int64), np.where(never, 0, 1).astype(np.int64))


def _equal(a: Interval, b: Interval) -> Interval:
    same = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return _truth(same, (a.high < b.low) | (b.high < a.low))


def _not_equal(a: Interval, b: Interval) -> Interval:
    equal = _equal(a, b)
    return Interval(1 - equal.high, 1 - equal.low)


def _less(a: Interval, b: Interval) -> Interval:
    return _truth(a.high < b.low, a.low >= b.high)


def _at_most(a: Interval, b: Interval) -> Interval:
    return _truth(a.high <= b.low, a.low > b.high)


def _where(condition: Interval, a: Interval, b: Interval) -> Interval:
    yes, no = condition.low == 1, condition.high == 0
    low = np.where(yes, a.low, np.where(no, b.low, np.minimum(a.low, b.low)))
    high = np.where(yes, a.high, np.where(no, b.high, np.maximum(a.high, b.high)))
    return Interval(low, high)


def _opposite(a: Interval) -> Interval:
    """Of a truth."""
    return Interval(1 - a.high, 1 - a.low)


def _complement(a: Interval) -> Interval:
    """The other bits of a whole number: -1 - a, without an end where a has none."""
    return Interval(np.where(a.high >= FAR, -FAR, ~a.high), np.where(a.low <= -FAR, FAR, ~a.low))


_ARITHMETIC: dict[str, Callable[..., Interval]] = {
    "add": lambda a, b: Interval(a.low + b.low, a.high + b.high),
    "sub": lambda a, b: Interval(a.low - b.high, a.high - b.low),
    "mul": _multiply,
    "floor_divide": _floor_divide,
    "neg": lambda a: Interval(-a.high, -a.low),
    "abs": _abs,
    "shift_left": _shift_left,
    "shift_right": _shift_right,
}
_RULES: dict[str, Callable[..., Interval]] = {
    "remainder": _remainder,
    "minimum": lambda a, b: Interval(np.minimum(a.low, b.low), np.minimum(a.high, b.high)),
    "maximum": lambda a, b: Interval(np.maximum(a.low, b.low), np.maximum(a.high, b.high)),
    "and": _and,
    "or": _or,
    "xor": _xor,
    "lt": _less,
    "le": _at_most,
    "eq": _equal,
    "ne": _not_equal,
    "where": _where,
    "to_int": lambda a: a,
    "to_bool": lambda a: _not_equal(a, Interval.of(0, 0)),
}
