"""What operators and functions of one operation record, by their names in ``torch`` and ``torch.Tensor``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flash_attention.mods.captured import CapturedInt
from flash_attention.mods.operands import applied, converted, kind_of, operand, recording_of
from flash_attention.mods.refusal import refused
from flash_attention.mods.registry import RULES, call_named, rule
from flash_attention.mods.symbols import Symbol, gathered
from flash_helpers.mods.intervals import intervals
from flash_helpers.mods.operations import Kind

BOOL, INT, FLOAT = Kind


# ---------------------------------------------------------------------- by one operation
_UNARY = {
    "exp": "exp", "exp2": "exp2", "log": "log", "log2": "log2", "log1p": "log1p",
    "expm1": "expm1", "sqrt": "sqrt",
    "rsqrt": "rsqrt", "tanh": "tanh", "sigmoid": "sigmoid", "erf": "erf", "sin": "sin", "cos": "cos",
    "special_erf": "erf", "special_expit": "sigmoid", "special_exp2": "exp2", "special_log1p": "log1p",
    "special_expm1": "expm1",
}  # fmt: skip
for _name, _op in _UNARY.items():
    RULES[_name] = lambda input, *, _op=_op: applied(_op, input)

for _name, _op in {
    "lt": "lt", "less": "lt", "le": "le", "less_equal": "le", "eq": "eq", "ne": "ne", "not_equal": "ne",
    "minimum": "minimum", "maximum": "maximum",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor",
    "bitwise_left_shift": "shift_left", "bitwise_right_shift": "shift_right",
}.items():  # fmt: skip
    RULES[_name] = lambda input, other, *, _op=_op: applied(_op, input, other)
for _name, _op in {"gt": "lt", "greater": "lt", "ge": "le", "greater_equal": "le"}.items():
    RULES[_name] = lambda input, other, *, _op=_op: applied(_op, other, input)


def _divided(op: str) -> Callable[[Any, Any], Any]:
    def divided(input: Any, other: Any) -> Any:
        if type(other) is int and other == 0 and kind_of(input) is not FLOAT:
            raise refused("a whole number is divided by the number 0", "Divide by another number")
        return applied(op, input, other)

    return divided


RULES["floor_divide"], RULES["remainder"] = _divided("floor_divide"), _divided("remainder")


@rule("mul", "multiply")
def _mul(input: Any, other: Any) -> Symbol:
    return applied("mul", input, other)


@rule("add")
def _add(input: Any, other: Any, *, alpha: Any = 1) -> Symbol:
    if max(kind_of(input), kind_of(other)) is BOOL:
        alpha = bool(alpha)
    return applied("add", input, other if _is_one(alpha) else other * alpha)


@rule("sub", "subtract")
def _sub(input: Any, other: Any, *, alpha: Any = 1) -> Symbol:
    return applied("sub", input, other if _is_one(alpha) else other * alpha)


def _is_one(alpha: Any) -> bool:
    return not isinstance(alpha, Symbol) and bool(alpha == 1)


@rule("rsub")
def _rsub(input: Any, other: Any) -> Symbol:
    return applied("sub", other, input)


@rule("div", "true_divide", "divide")
def _div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode == "floor":
        return applied("floor_divide", input, other)
    quotient = applied("divide", input, other)
    if rounding_mode is None:
        return quotient
    if rounding_mode != "trunc":
        raise refused(
            f"div has rounding_mode={rounding_mode!r}", "rounding_mode may be None, 'floor' or 'trunc'"
        )
    if max(kind_of(input), kind_of(other)) is FLOAT:
        return applied("trunc", quotient)
    rounded = _divided("floor_divide")(input, other)
    # Below 0 and not divided without a rest, it is one more.
    is_between = applied("lt", rounded, 0) & (applied("mul", rounded, other) != input)
    return applied("add", rounded, converted(is_between, INT))


@rule("fmod")
def _fmod(input: Any, other: Any) -> Symbol:
    """The remainder of the absolute values, with the sign of the first."""
    is_negative = applied("lt", input, 0)
    size = _absolute(input)
    if kind_of(input) is FLOAT:  # of which the derivative at 0 is 1, unlike that of the absolute value
        size = call_named("where", (is_negative, -input, input), {})
    rest = call_named("remainder", (size, _absolute(other)), {})
    return call_named("where", (is_negative, -rest, rest), {})


@rule("float_power")
def _float_power(input: Any, exponent: Any) -> Symbol:
    return _pow(converted(input, FLOAT) if isinstance(input, Symbol) else input * 1.0, exponent)


@rule("pow")
def _pow(input: Any, exponent: Any) -> Symbol:
    if isinstance(exponent, CapturedInt):
        exponent = int(exponent)
    if isinstance(exponent, int) and not isinstance(exponent, bool) and 0 <= exponent <= 64:
        return _whole_power(input, exponent)
    if kind_of(input) is FLOAT or kind_of(exponent) is FLOAT:
        return (
            applied("sqrt", input)
            if not isinstance(exponent, Symbol | Tensor) and exponent == 0.5
            else applied("pow", input, exponent)
        )
    if not isinstance(input, Symbol) and input == 2 and _is_not_negative(exponent):
        return applied("shift_left", 1, exponent)
    raise refused(
        "a power of whole numbers has an exponent that is negative, above 64 or a value",
        "Take a real number, e.g. x.float() ** e or 2.0 ** e; 2 ** h is recorded, too",
    )


def _is_not_negative(x: Symbol) -> bool:
    """Whether the bounds of a value show that it is never below 0."""
    mod = x._recording.builder.finish({"value": x.value()[0]})
    return int(intervals(mod)[-1].low) >= 0


def _whole_power(base: Symbol, exponent: int) -> Symbol:
    """By squaring; of a bool it is a whole number."""
    found: Any = None
    square: Any = converted(base, INT) if kind_of(base) is BOOL else base
    while exponent:
        if exponent & 1:
            found = square if found is None else applied("mul", found, square)
        exponent >>= 1
        if exponent:
            square = applied("mul", square, square)
    return call_named("ones_like", (square,), {}) if found is None else found


@rule("neg", "negative")
def _neg(input: Any) -> Symbol:
    return applied("neg", input)


@rule("positive")
def _positive(input: Any) -> Any:
    return input


def _absolute(x: Any) -> Any:
    return applied("abs", x) if isinstance(x, Symbol) else abs(x)


@rule("abs", "absolute")
def _abs(input: Any) -> Symbol:
    return applied("abs", input)


for _name in ("and", "or", "xor"):
    RULES[f"logical_{_name}"] = lambda input, other, *, _op=_name: applied(
        _op, _truth(input, other), _truth(other, input)
    )


def _truth(x: Any, other: Any) -> Any:
    """Whether an operand is not 0."""
    if isinstance(x, Symbol):
        return converted(x, BOOL)
    if isinstance(x, Tensor):
        place, length = operand(recording_of(other), x)
        return converted(Symbol(recording_of(other), place, length), BOOL)
    return bool(x)


@rule("logical_not")
def _logical_not(input: Any) -> Symbol:
    return applied("not", converted(input, BOOL))


@rule("bitwise_not")
def _bitwise_not(input: Any) -> Symbol:
    return applied("not", input)


for _name in ("floor", "ceil", "trunc"):
    RULES[_name] = lambda input, *, _op=_name: applied(_op, input) if kind_of(input) is FLOAT else input
RULES["fix"] = RULES["trunc"]


@rule("round")
def _round(input: Any, *, decimals: int = 0) -> Any:
    if kind_of(input) is not FLOAT:
        return input
    if decimals < 0:
        return applied("round", input / 10.0**-decimals) * 10.0**-decimals
    return applied("round", input * 10.0**decimals) / 10.0**decimals if decimals else applied("round", input)


def swapped(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: function(b, a)


# ---------------------------------------------------------------------- operators
@rule("__getitem__", "index", "select")
def _getitem(input: Any, index: Any, *rest: Any) -> Any:
    if rest:
        raise refused("select is not recorded", "Write tensor[index]")
    if isinstance(input, Symbol):
        return input[index]
    found = index if isinstance(index, tuple | list) else (index,)
    return gathered(recording_of(*found), input, index)


@rule("embedding")
def _embedding(
    input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, norm_type: Any = 2.0, *rest: Any,
    **more: Any,
) -> Any:  # fmt: skip
    """A row of a table, as ``nn.Embedding`` gives it. PyTorch's operator has the table first."""
    if padding_idx not in (None, -1) or any((max_norm, norm_type is True, *rest, *more.values())):
        raise refused(
            "embedding has padding_idx, max_norm, scale_grad_by_freq or sparse",
            "Leave them out, or write weight[index]",
        )
    index, table = (weight, input) if isinstance(weight, Symbol) else (input, weight)
    return gathered(recording_of(index), table, index)


_OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq", "ne": "ne",
    "matmul": "matmul",
}  # fmt: skip


def _operator(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: call_named(name, (self, other), {})


for _sign_name, _name in _OPERATORS.items():
    RULES[f"__{_sign_name}__"] = RULES[_name]
    setattr(Symbol, f"__{_sign_name}__", _operator(_name))
    if _sign_name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        RULES[f"__r{_sign_name}__"] = swapped(RULES[_name])
        setattr(Symbol, f"__r{_sign_name}__", swapped(_operator(_name)))
for _sign_name, _name in {"neg": "neg", "abs": "abs", "invert": "bitwise_not"}.items():
    RULES[f"__{_sign_name}__"] = RULES[_name]
    setattr(Symbol, f"__{_sign_name}__", lambda self, _name=_name: call_named(_name, (self,), {}))
setattr(Symbol, "__pos__", lambda self: self)  # noqa: B010
