"""Activations of ``torch.nn.functional``, recorded as several operations."""

from __future__ import annotations

import math
from typing import Any

from flash_attention.mods.operands import applied, converted, kind_of
from flash_attention.mods.refusal import refused
from flash_attention.mods.registry import RULES, rule
from flash_attention.mods.symbols import Symbol
from flash_helpers.mods.operations import Kind

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934, 1.6732632423543772848


def _where(condition: Any, input: Any, other: Any) -> Symbol:
    return RULES["where"](condition, input, other)  # type: ignore[no-any-return]


def _clamp(input: Any, min: Any, max: Any) -> Any:
    return RULES["clamp"](input, min, max)


@rule("hardtanh")
def _hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Symbol:
    low, high = _limits(input, min_val, max_val)
    return _where(input <= low, low, _where(input >= high, high, input))


def _limits(input: Any, *numbers: Any) -> list[Any]:
    """Numbers as PyTorch takes them beside a value: beside a whole one, their whole parts."""
    return [int(x) if kind_of(input) is Kind.INT else x for x in numbers]


@rule("relu6")
def _relu6(input: Any, inplace: bool = False) -> Symbol:
    return _hardtanh(input, 0, 6)


@rule("relu")
def _relu(input: Any, inplace: bool = False) -> Symbol:
    return _where(input <= 0, 0, input) if kind_of(input) is Kind.FLOAT else applied("maximum", input, 0)


@rule("gelu")
def _gelu(input: Any, approximate: str = "none") -> Symbol:
    x = converted(input, Kind.FLOAT)
    if approximate == "tanh":
        inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
        return x * 0.5 * (applied("tanh", inner) + 1.0)
    if approximate != "none":
        raise refused(f"gelu with approximate={approximate!r} is not recorded", "It may be 'none' or 'tanh'")
    return x * 0.5 * (applied("erf", x * math.sqrt(0.5)) + 1.0)


@rule("silu")
def _silu(input: Any, inplace: bool = False) -> Symbol:
    return input * applied("sigmoid", input)


@rule("softplus")
def _softplus(input: Any, beta: float = 1.0, threshold: float = 20.0) -> Symbol:
    scaled = input * beta
    is_large = scaled > threshold
    return _where(is_large, input, applied("log1p", applied("exp", _where(is_large, 0.0, scaled))) / beta)


@rule("leaky_relu")
def _leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Symbol:
    return _where(input > 0, input, input * negative_slope)


@rule("elu")
def _elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Symbol:
    return _where(input > 0, input, applied("expm1", _negative_part(input)) * alpha)


def _negative_part(x: Any) -> Any:
    """x where it is not above 0. Where another value is taken, an infinite derivative would make it NaN."""
    return _where(x > 0, 0.0, x)


@rule("logsigmoid", "log_sigmoid")
def _logsigmoid(input: Any) -> Symbol:
    return applied("minimum", input, 0.0) - applied("log1p", applied("exp", -applied("abs", input)))


@rule("celu")
def _celu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Symbol:
    return _where(input > 0, input, applied("expm1", _negative_part(input) / alpha) * alpha)


@rule("selu")
def _selu(input: Any, inplace: bool = False) -> Symbol:
    return _elu(input, _SELU_ALPHA) * _SELU_SCALE


@rule("mish")
def _mish(input: Any, inplace: bool = False) -> Symbol:
    return input * applied("tanh", _softplus(input))


@rule("hardsigmoid")
def _hardsigmoid(input: Any, inplace: bool = False) -> Any:
    return _hardtanh(input + 3.0, 0.0, 6.0) / 6.0


@rule("hardswish")
def _hardswish(input: Any, inplace: bool = False) -> Symbol:
    return input * _hardsigmoid(input)


@rule("softsign")
def _softsign(input: Any) -> Symbol:
    return input / (applied("abs", input) + 1.0)


@rule("tanhshrink")
def _tanhshrink(input: Any) -> Symbol:
    return input - applied("tanh", input)


@rule("softshrink")
def _softshrink(input: Any, lambd: float = 0.5) -> Symbol:
    return input - _clamp(input, -lambd, lambd)


@rule("hardshrink")
def _hardshrink(input: Any, lambd: float = 0.5) -> Symbol:
    return _where(applied("abs", input) <= lambd, 0.0, input)


@rule("threshold", "_threshold")
def _threshold(input: Any, threshold: float, value: float, inplace: bool = False) -> Symbol:
    threshold, value = _limits(input, threshold, value)
    return _where(input <= threshold, value, input)
