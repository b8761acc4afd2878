"""Conversions of values, and constants like a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attention.mods.operands import converted, kind_of, operand
from flash_attention.mods.refusal import refused
from flash_attention.mods.registry import RULES, rule
from flash_attention.mods.symbols import Symbol
from flash_helpers.mods.operations import Kind

BOOL, INT, FLOAT = Kind
_KINDS = {
    torch.bool: BOOL, torch.int64: INT, torch.int32: INT, torch.float32: FLOAT, bool: BOOL, int: INT,
    float: FLOAT,
}  # fmt: skip


@rule("to")
def _to(input: Any, *args: Any, **kwargs: Any) -> Symbol:
    found = input
    for i, x in enumerate((*args, *(v for n, v in kwargs.items() if n in ("dtype", "other")))):
        if isinstance(x, torch.dtype | type):
            found = _as(found, x)
        elif isinstance(x, Symbol):
            found = converted(found, kind_of(x))
        elif isinstance(x, Tensor):
            found = _as(found, x.dtype)
        elif not (isinstance(x, torch.device | str) or (i and isinstance(x, bool))):
            raise refused(f"to({x!r:.60}) is not recorded", "Name one of bool, int32, int64, float32")
    return found


@rule("type")
def _type(input: Any, dtype: Any = None, non_blocking: bool = False) -> Symbol:
    if not isinstance(dtype, torch.dtype | type):  # the text of a type, or the question for one
        raise refused(f"type({dtype!r:.60}) is not recorded", "Write .to(torch.int64), or ask for .dtype")
    return _as(input, dtype)


def _as(x: Symbol, dtype: Any) -> Symbol:
    if dtype not in _KINDS:
        raise refused(
            f"a value is converted to {dtype}",
            "Values are bool, int64 or float32; int32 means the same as int64",
        )
    return converted(x, _KINDS[dtype])


RULES["type_as"] = lambda input, other: _to(input, other)
for _name, _dtype in {
    "float": torch.float32,
    "int": torch.int32,
    "long": torch.int64,
    "bool": torch.bool,
    "half": torch.float16,  # these are refused by the type's name
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
}.items():
    RULES[_name] = lambda input, *, _dtype=_dtype: _as(input, _dtype)


def _filled(input: Symbol, value: Any, dtype: Any, is_single: bool = False) -> Symbol:
    recording, length = input._recording, None if is_single else input.value()[1]
    kind = kind_of(input) if dtype is None else _KINDS.get(dtype)
    if kind is None:
        raise refused(f"a value is made with {dtype}", "Values are bool, int64 or float32")
    place = recording.builder.convert(operand(recording, value)[0], kind)
    return Symbol(recording, place, length)


@rule("ones_like")
def _ones_like(input: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Symbol:
    return _filled(input, 1, dtype)


@rule("zeros_like")
def _zeros_like(input: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Symbol:
    return _filled(input, 0, dtype)


@rule("full_like")
def _full_like(input: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Symbol:
    return _filled(input, fill_value, dtype)


def _new(value: int) -> Callable[..., Symbol]:
    def made(
        input: Any, *size: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, **k: Any
    ) -> Symbol:
        given = size[0] if len(size) == 1 else size
        if tuple(k.pop("size", () if not size else given)) != () or k:
            raise refused(
                "a tensor with dimensions is made", "A mod makes single values: the size must be ()"
            )
        return _filled(input, value, dtype, is_single=True)

    return made


RULES["new_ones"], RULES["new_zeros"] = _new(1), _new(0)


@rule("new_full")
def _new_full(input: Any, size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Symbol:
    if tuple(size) != ():
        raise refused("a tensor with dimensions is made", "A mod makes single values: the size must be ()")
    return _filled(input, fill_value, dtype, is_single=True)


@rule("clone", "contiguous")
def _same(input: Any) -> Any:
    return input


@rule("unsqueeze")
def _unsqueeze(input: Any, dim: int) -> Symbol:
    place, length = input.value()
    if length is not None or dim not in (0, -1):
        raise refused("a row gets a second dimension", "A mod has single values and rows")
    return Symbol(input._recording, place, 1)


@rule("squeeze")
def _squeeze(input: Any, dim: int = -1) -> Symbol:
    place, length = input.value()
    return Symbol(input._recording, place) if length == 1 else input
