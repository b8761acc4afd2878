"""Numbers that a function captures, marked so that they become arguments of the launch.

A captured number stays a number: Python's own functions, loops and branches use it as one. What is
computed of
captured numbers is captured, too. Where a number gets lost on the way, as through ``math.floor``, its
value is
part of the mod, which is right as well: a function is recorded for each call.
"""

from __future__ import annotations

import dis
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import numpy as np


class _Captured:
    """What both kinds have.

    Attributes:
        origin: where the number comes from, equal for the same number only.
        of_numpy: what it was, if that was a number of NumPy's.
    """

    origin: Any
    of_numpy: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(_plain(self) if self.of_numpy is None else self.of_numpy, name)  # such as ``dtype``


class CapturedInt(int, _Captured):
    """A whole number."""


class CapturedFloat(float, _Captured):
    """A real number."""


def captured(value: Any, origin: Any) -> Any:
    """A number of a user's function, marked; anything else as it is."""
    if type(value) is int:
        value = CapturedInt(value)
    elif type(value) is float:
        value = CapturedFloat(value)
    elif isinstance(value, np.integer | np.floating):
        of_numpy, value = value, (CapturedInt if isinstance(value, np.integer) else CapturedFloat)(value)
        value.of_numpy = of_numpy
    else:
        return value
    value.origin = origin
    return value


def _origin(x: Any) -> Any:
    return x.origin if isinstance(x, _Captured) else x


def _arithmetic(name: str, function: Callable[..., Any], n: int) -> None:
    def forward(self: Any, *others: Any) -> Any:
        plain = [_plain(x) for x in (self, *others)]
        if any(x is None for x in plain):
            return NotImplemented
        return captured(function(*plain), (name, *map(_origin, (self, *others))))

    def reflected(self: Any, other: Any) -> Any:
        if (left := _plain(other)) is None:
            return NotImplemented
        return captured(function(left, _plain(self)), (name, _origin(other), _origin(self)))

    for kind in (CapturedInt, CapturedFloat):
        if getattr(kind, f"__{name}__", None) is not None:
            setattr(kind, f"__{name}__", forward)
            if n == 2:
                setattr(kind, f"__r{name}__", reflected)


def _plain(x: Any) -> Any:
    """A number without its mark; None: no number of Python's."""
    if isinstance(x, bool):
        return x
    if isinstance(x, int):
        return int(x)
    return float(x) if type(x) in (float, CapturedFloat) else None


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _arithmetic(_name, getattr(operator, _name), 2)
for _name, _function in (("lshift", operator.lshift), ("rshift", operator.rshift)):
    _arithmetic(_name, _function, 2)
for _name, _function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
    _arithmetic(_name, _function, 2)
for _name in ("neg", "abs"):
    _arithmetic(_name, getattr(operator, _name), 1)


# ---------------------------------------------------------------------- functions
def opened(function: Any, seen: dict[int, Any] | None = None) -> Any:
    """The same function with its captured numbers marked: of closures, of ``functools.partial``, of defaults.

    Functions within are opened as well. What is no plain function, as an object with ``__call__``, stays
    as it
    is: numbers that it holds are constants.
    """
    seen = {} if seen is None else seen
    if id(function) in seen:
        return seen[id(function)]
    if isinstance(function, functools.partial):
        inner = opened(function.func, seen)
        args = [_opened_value(x, (id(function), i), seen) for i, x in enumerate(function.args)]
        keywords = {n: _opened_value(x, (id(function), n), seen) for n, x in function.keywords.items()}
        return functools.partial(inner, *args, **keywords)
    if isinstance(function, types.MethodType):
        return types.MethodType(opened(function.__func__, seen), function.__self__)
    if not isinstance(function, types.FunctionType) or _writes_cells(function.__code__):
        return function
    cells = function.__closure__
    if not (cells or function.__defaults__ or function.__kwdefaults__):
        return function
    new_cells = None if cells is None else tuple(types.CellType() for _ in cells)
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, new_cells)
    seen[id(function)] = made  # before its cells are looked at: a function may capture itself
    made.__dict__.update(function.__dict__)
    made.__defaults__ = _opened_all(function.__defaults__, (id(function), "default"), seen)
    if function.__kwdefaults__:
        made.__kwdefaults__ = {
            n: _opened_value(x, (id(function), n), seen) for n, x in function.__kwdefaults__.items()
        }
    for old, new in zip(cells or (), new_cells or (), strict=True):
        try:
            content = old.cell_contents
        except ValueError:  # nothing was assigned to it yet
            continue
        new.cell_contents = _opened_value(content, id(old), seen)
    return made


def _opened_value(value: Any, origin: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return opened(value, seen)
    if type(value) is tuple:
        return _opened_all(value, origin, seen)
    return captured(value, origin)


def _opened_all(values: Any, origin: Any, seen: dict[int, Any]) -> Any:
    if values is None:
        return None
    return tuple(_opened_value(x, (origin, i), seen) for i, x in enumerate(values))


@functools.lru_cache(maxsize=1024)
def _writes_cells(code: types.CodeType) -> bool:
    """Whether a function, or one within it, assigns to a variable of the function around it, which a copy
    would not."""
    return not _written_cells(code).isdisjoint(code.co_freevars)


def _written_cells(code: types.CodeType) -> set[str]:
    """Variables that code shares with other functions and assigns to."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_DEREF", "DELETE_DEREF")}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= _written_cells(inner) & set(inner.co_freevars)
    return found
