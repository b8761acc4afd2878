"""The operations of a mod: what each takes and gives, what it costs, and its value for numbers.

Whole numbers have 64 bits and wrap around. What C leaves open is defined here, the same for CPU and GPU:

    a // b, a % b    round to minus infinity; a whole number divided by 0 gives 0, with remainder 0
    a << b, a >> b   a count below 0 or above 63 gives 0, of >> the sign: -1 or 0
    to_int           towards zero; beyond +-2^62 it gives that, of NaN 0
    random           (seed, b, h, q, k), in [0, 1) (``philox``); of the last four the low 32 bits count
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from flash_helpers.mods.philox import random_real


class Kind(IntEnum):
    """The type of a value; of two operands the larger one wins."""

    BOOL = 0
    INT = 1
    FLOAT = 2


LARGEST_INT = 2**62  # beyond it ``to_int`` gives no more
INDICES = ("b", "h", "q", "k")
BOOL, INT, FLOAT = Kind


@dataclass(frozen=True)
class Operation:
    """An operation of values.

    Attributes:
        kinds: of its operands, which may be any one of these, all operands the same.
        n: how many operands.
        result: its kind; None: that of its operands.
        cost: about how many instructions it takes of a thread.
        value: the same of Python numbers.
        sign: how it is printed between its operands; empty: as a function.
    """

    kinds: tuple[Kind, ...]
    n: int
    result: Kind | None
    cost: float
    value: Callable[..., Any]
    sign: str = ""


def wrapped(x: int) -> int:
    """The 64 bits of a whole number."""
    return (x + 2**63) % 2**64 - 2**63


def _floor_divide(a: Any, b: Any) -> Any:
    if isinstance(a, float):
        return a // b if b else _divide(a, b)
    return wrapped(a // b) if b else 0


def _remainder(a: Any, b: Any) -> Any:
    if isinstance(a, float):
        if math.isinf(a) or not b:
            return math.nan
        return math.fmod(a, b) if math.isinf(b) and (a < 0) == (b < 0) else a % b
    return a % b if b else 0


def _divide(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _to_int(x: Any) -> int:
    if isinstance(x, float):
        return 0 if math.isnan(x) else int(max(-LARGEST_INT, min(x, LARGEST_INT)))
    return int(x)


def _minimum(a: Any, b: Any) -> Any:
    return a if a != a or a < b else b


def _maximum(a: Any, b: Any) -> Any:
    return a if a != a or a > b else b


def _shift_left(a: int, b: int) -> int:
    return wrapped(a << b) if 0 <= b < 64 else 0


def _shift_right(a: int, b: int) -> int:
    return a >> (b if 0 <= b < 64 else 63)


def _whole_or_float(value: Callable[..., Any]) -> Callable[..., Any]:
    def evaluated(*operands: Any) -> Any:
        found = value(*operands)
        return wrapped(found) if isinstance(found, int) and not isinstance(found, bool) else found

    return evaluated


def _guarded(value: Callable[..., float]) -> Callable[..., float]:
    """NaN or infinity where Python raises."""

    def evaluated(*operands: float) -> float:
        try:
            return value(*operands)
        except OverflowError:
            return math.inf
        except ValueError:
            return math.nan

    return evaluated


def _log(value: Callable[[float], float]) -> Callable[[float], float]:
    return _guarded(lambda x: -math.inf if x == 0 else value(x))


def _pow(a: float, b: float) -> float:
    if a == 0 and b < 0:
        return math.copysign(math.inf, a) if b % 2 == 1 else math.inf
    if math.isfinite(a) and a < 0 and b % 1 != 0 and math.isfinite(b):
        return math.nan
    try:
        return a**b
    except OverflowError:
        return -math.inf if a < 0 and b % 2 == 1 else math.inf


def _sigmoid(x: float) -> float:
    return 0.0 if x <= -700 else 1 / (1 + math.exp(-x))


_NUMBERS, _WHOLE, _LOGIC, _REAL = (INT, FLOAT), (INT,), (BOOL, INT), (FLOAT,)


def _function(cost: float, value: Callable[..., float], n: int = 1) -> Operation:
    return Operation(_REAL, n, None, cost, _guarded(value))


OPERATIONS: dict[str, Operation] = {
    "add": Operation(_NUMBERS, 2, None, 1, _whole_or_float(lambda a, b: a + b), "+"),
    "sub": Operation(_NUMBERS, 2, None, 1, _whole_or_float(lambda a, b: a - b), "-"),
    "mul": Operation(_NUMBERS, 2, None, 1, _whole_or_float(lambda a, b: a * b), "*"),
    "divide": Operation(_REAL, 2, None, 8, _divide, "/"),
    "floor_divide": Operation(_NUMBERS, 2, None, 20, _floor_divide, "//"),
    "remainder": Operation(_NUMBERS, 2, None, 20, _remainder, "%"),
    "pow": Operation(_REAL, 2, None, 30, _guarded(_pow), "**"),
    "and": Operation(_LOGIC, 2, None, 1, lambda a, b: a & b, "&"),
    "or": Operation(_LOGIC, 2, None, 1, lambda a, b: a | b, "|"),
    "xor": Operation(_LOGIC, 2, None, 1, lambda a, b: a ^ b, "^"),
    "not": Operation(_LOGIC, 1, None, 1, lambda a: not a if isinstance(a, bool) else ~a, "~"),
    "shift_left": Operation(_WHOLE, 2, None, 1, _shift_left, "<<"),
    "shift_right": Operation(_WHOLE, 2, None, 1, _shift_right, ">>"),
    "lt": Operation(_NUMBERS, 2, BOOL, 1, lambda a, b: a < b, "<"),
    "le": Operation(_NUMBERS, 2, BOOL, 1, lambda a, b: a <= b, "<="),
    "eq": Operation(_NUMBERS, 2, BOOL, 1, lambda a, b: a == b, "=="),
    "ne": Operation(_NUMBERS, 2, BOOL, 1, lambda a, b: a != b, "!="),
    "neg": Operation(_NUMBERS, 1, None, 1, _whole_or_float(lambda a: -a), "-"),
    "abs": Operation(_NUMBERS, 1, None, 1, _whole_or_float(abs)),
    "minimum": Operation(_NUMBERS, 2, None, 1, _minimum),
    "maximum": Operation(_NUMBERS, 2, None, 1, _maximum),
    "exp": _function(3, math.exp),
    "exp2": _function(2, lambda x: 2.0**x),
    "log": _function(4, _log(math.log)),
    "log2": _function(3, _log(math.log2)),
    "log1p": _function(12, _guarded(lambda x: -math.inf if x == -1 else math.log1p(x))),
    "expm1": _function(12, math.expm1),
    "sqrt": _function(6, math.sqrt),
    "rsqrt": _function(4, lambda x: _divide(1.0, math.sqrt(x))),
    "tanh": _function(9, math.tanh),
    "sigmoid": _function(8, _sigmoid),
    "erf": _function(18, math.erf),
    "sin": _function(20, math.sin),
    "cos": _function(20, math.cos),
    "floor": _function(1, lambda x: float(math.floor(x)) if math.isfinite(x) else x),
    "ceil": _function(1, lambda x: float(math.ceil(x)) if math.isfinite(x) else x),
    "round": _function(1, lambda x: float(round(x)) if math.isfinite(x) else x),
    "trunc": _function(1, lambda x: float(math.trunc(x)) if math.isfinite(x) else x),
    "random": Operation(_WHOLE, 5, FLOAT, 70, random_real),
    "to_float": Operation(_LOGIC, 1, FLOAT, 1, float),
    "to_int": Operation((BOOL, FLOAT), 1, INT, 1, _to_int),
    "to_bool": Operation(_NUMBERS, 1, BOOL, 1, bool),
}
"""By name. Beside them stand leaves (``mod.Node``), and

    where     (condition, a, b), a and b of one kind
    load      an element of a captured tensor, by as many indices as it has dimensions
    any, all, sum, largest, smallest   of an expression for each of ``data`` values of ``loop``
"""

REDUCTIONS: dict[str, Operation] = {
    "any": Operation((BOOL,), 1, None, 1, any),
    "all": Operation((BOOL,), 1, None, 1, all),
    "sum": Operation(_NUMBERS, 1, None, 1, sum),
    "largest": Operation(_NUMBERS, 1, None, 1, max),
    "smallest": Operation(_NUMBERS, 1, None, 1, min),
}
COMPARISONS = ("lt", "le", "eq", "ne")
WHERE_COST, LOAD_COST = 1.0, 6.0
