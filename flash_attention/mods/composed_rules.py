"""Functions of PyTorch that are recorded as several operations, and reductions of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attention.mods.operands import applied, converted, joined, kind_of, operand, recording_of
from flash_attention.mods.refusal import refused
from flash_attention.mods.registry import RULES, rule
from flash_attention.mods.symbols import Symbol
from flash_helpers.mods.operations import Kind

BOOL, INT, FLOAT = Kind


@rule("where")
def _where(condition: Any, input: Any, other: Any) -> Symbol:
    if isinstance(condition, bool):
        condition = torch.tensor(condition)
    recording = recording_of(condition, input, other)
    operands = [operand(recording, x) for x in (condition, input, other)]
    if recording.builder.kind(operands[0][0]) is not BOOL:
        raise refused("the condition of where is no bool", "Compare it with something, e.g. value != 0")
    return Symbol(recording, recording.where(*(p for p, _ in operands)), joined(*(n for _, n in operands)))


@rule("_where_as_a_method")
def _where_as_a_method(input: Any, condition: Any, other: Any) -> Symbol:
    return _where(condition, input, other)


@rule("masked_fill")
def _masked_fill(input: Any, mask: Any, value: Any) -> Symbol:
    if kind_of(input) is not FLOAT and not (isinstance(value, float) and math.isinf(value)):
        value = RULES["full_like"](input, value)  # the type stays
    return _where(mask, value, input)


@rule("clamp", "clip")
def _clamp(input: Any, min: Any = None, max: Any = None) -> Symbol:
    found = input if min is None else _limited(input, min, "maximum")
    return found if max is None else _limited(found, max, "minimum")


def _limited(x: Any, limit: Any, op: str) -> Any:
    """The maximum or minimum, of which the derivative at the limit is 1, and not one half."""
    if FLOAT not in (kind_of(x), kind_of(limit)):
        return applied(op, x, limit)
    if isinstance(limit, Tensor):
        recording = recording_of(x)
        limit = Symbol(recording, *operand(recording, limit))
    is_nan = applied("ne", limit, limit) if isinstance(limit, Symbol) else bool(limit != limit)
    is_beyond = applied("lt", x, limit) if op == "maximum" else applied("lt", limit, x)
    return _where(is_beyond | is_nan, limit, x)


RULES["clamp_min"] = lambda input, min: _clamp(input, min)
RULES["clamp_max"] = lambda input, max: _clamp(input, None, max)


@rule("tan")
def _tan(input: Any) -> Symbol:
    return applied("sin", input) / applied("cos", input)


@rule("sinh")
def _sinh(input: Any) -> Symbol:
    is_small = applied("abs", input) < 1.0
    grown = applied("expm1", _where(is_small, input, 0.0))
    return _where(is_small, grown + grown / (grown + 1.0), _both_ways(input, -1.0)) * 0.5


@rule("cosh")
def _cosh(input: Any) -> Any:
    return _both_ways(input, 1.0) * 0.5


def _both_ways(x: Any, sign: float) -> Any:
    return applied("exp", x) + applied("exp", -x) * sign


@rule("lerp")
def _lerp(input: Any, end: Any, weight: Any) -> Symbol:
    return input + (end - input) * weight


@rule("addcmul")
def _addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Symbol:
    return input + tensor1 * tensor2 * value


@rule("addcdiv")
def _addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Symbol:
    return input + tensor1 / tensor2 * value


@rule("hypot")
def _hypot(input: Any, other: Any) -> Symbol:
    return applied("sqrt", input * input + other * other)


@rule("logaddexp")
def _logaddexp(input: Any, other: Any) -> Symbol:
    apart = _where(input == other, 0.0, input - other)  # two infinities are not subtracted
    return applied("log1p", applied("exp", -applied("abs", apart))) + applied("maximum", input, other)


@rule("xlogy", "special_xlogy")
def _xlogy(input: Any, other: Any) -> Symbol:
    if not isinstance(other, Symbol):
        other = RULES["full_like"](converted(input, FLOAT), other)
    is_zero = (input == 0) & ((other <= 0) | (other == math.inf))
    return input * applied("log", _where(is_zero, 1.0, other))


@rule("frac")
def _frac(input: Any) -> Symbol:
    return input - RULES["trunc"](input)


@rule("heaviside")
def _heaviside(input: Any, values: Any) -> Symbol:
    return _where(input == 0, values, converted(input > 0, kind_of(input)))


@rule("nan_to_num")
def _nan_to_num(
    input: Any, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Symbol:
    if kind_of(input) is not FLOAT:
        return input
    largest = torch.finfo(torch.float32).max
    above = _where(input == math.inf, largest if posinf is None else posinf, input)
    found = _where(input == -math.inf, -largest if neginf is None else neginf, above)
    return _where(_isnan(input), 0.0 if nan is None else nan, found)


@rule("square")
def _square(input: Any) -> Symbol:
    return RULES["pow"](input, 2)  # type: ignore[no-any-return]


@rule("log10")
def _log10(input: Any) -> Symbol:
    return applied("log", input) * (1 / math.log(10))


@rule("reciprocal")
def _reciprocal(input: Any) -> Symbol:
    return applied("divide", 1.0, input)


@rule("sign", "sgn")
def _sign(input: Any) -> Symbol:
    if kind_of(input) is BOOL:
        return input
    zero: Any = 0.0 if kind_of(input) is FLOAT else 0
    return _where(input > 0, 1, _where(input < 0, -1, zero))


@rule("isnan")
def _isnan(input: Any) -> Symbol:
    return applied("ne", input, input)


@rule("isinf")
def _isinf(input: Any) -> Symbol:
    return applied("eq", applied("abs", input), math.inf)


@rule("isfinite")
def _isfinite(input: Any) -> Symbol:
    return applied("lt", applied("abs", input), math.inf)


# ---------------------------------------------------------------------- rows
def _reduced(op: str) -> Callable[..., Symbol]:
    def reduced(input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Symbol:
        if kwargs or keepdim or dim not in (None, -1, 0, (0,), (-1,), [0], [-1]):
            raise refused("a row is reduced with other arguments than dim=-1", "Write e.g. row.any(dim=-1)")
        recording, (place, length) = input._recording, input.value()
        if length is None:
            return _of_one(op, input)
        if length == 0 and op in ("largest", "smallest"):
            raise refused("a row without values has no largest one", "Give it at least one value")
        if op in ("any", "all"):
            place = recording.builder.convert(place, BOOL)
        return Symbol(recording, recording.reduce(op, length, place))

    return reduced


def _of_one(op: str, input: Any) -> Symbol:
    """What a reduction gives of a single value."""
    if op in ("any", "all"):
        return converted(input, BOOL)
    return converted(input, INT) if op == "sum" and kind_of(input) is BOOL else input


for _name, _op in {"any": "any", "all": "all", "sum": "sum", "amax": "largest", "amin": "smallest"}.items():
    RULES[_name] = _reduced(_op)


def _of_two_or_a_row(of_two: str, of_a_row: str) -> Callable[..., Symbol]:
    """``torch.max(a, b)``, or the largest of a row; beside that of a dimension PyTorch gives its place."""

    def found(input: Any, other: Any = None, **kwargs: Any) -> Symbol:
        if kwargs or isinstance(other, int):
            raise refused("the largest or smallest of a row is asked for with its place", _OF_A_ROW)
        return RULES[of_a_row](input) if other is None else applied(of_two, input, other)

    return found


_OF_A_ROW = "Write row.amax(-1) or row.amin(-1), which give no place"
RULES["max"], RULES["min"] = _of_two_or_a_row("maximum", "amax"), _of_two_or_a_row("minimum", "amin")


@rule("isin")
def _isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Symbol:
    recording = recording_of(elements, test_elements)
    rows = [operand(recording, x)[1] for x in (elements, test_elements)]
    if rows[0] is not None or rows[1] is None:
        raise refused("isin looks for a row, or in what is no row", "Write isin(value, row)")
    found = RULES["any"](applied("eq", elements, test_elements), -1)
    return applied("not", found) if invert else found


@rule("mean")
def _mean(input: Any, dim: Any = None) -> Symbol:
    length = input.value()[1]
    return RULES["sum"](input, dim) / (1 if length is None else length)


@rule("dot", "inner", "vdot", "matmul")
def _dot(input: Any, other: Any) -> Symbol:
    recording = recording_of(input, other)
    for x in (input, other):
        if operand(recording, x)[1] is None:
            raise refused(
                "a product of rows has an operand that is no row", "A row is a tensor with one index less"
            )
    return RULES["sum"](applied("mul", input, other), -1)
