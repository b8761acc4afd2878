"""What was noted while the compiler followed a function, done again with symbols, outside of the compiler."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from flash_attention.errors import ModError
from flash_attention.mods.randomness import OPERATOR as RANDOM
from flash_attention.mods.randomness import random
from flash_attention.mods.registry import RULES, call, name_of, shown, without_rule
from flash_attention.mods.symbols import WHERE, Symbol, begun_with_a_value, gathered
from flash_attention.mods.tracing import trace
from flash_helpers.mods.encoding import encoded

# What an operand is: a result of a step, a captured tensor, an open number, a constant, or several operands.
VALUE, TENSOR, NUMBER, CONSTANT, SEVERAL = range(5)
GET_ITEM = (Tensor.__getitem__, operator.getitem)
_OPERATORS = operator.add.__module__
_LARGE = 2**40  # stands for a whole number of 64 bits while a mod is made


@torch.compiler.assume_constant_result
def has_rule(function: Any) -> bool:
    return _takes_symbols(function) or name_of(function) in RULES


def _takes_symbols(function: Any) -> bool:
    """Whether a function is one of Python's operators, or ours."""
    return function is RANDOM or getattr(function, "__module__", None) == _OPERATORS


@torch.compiler.assume_constant_result
def no_rule(function: Any) -> str:
    if function.__name__ in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist"):
        return f"the function takes the number of a value that differs from score to score. {WHERE}"
    return without_rule(shown(function))


@torch.compiler.assume_constant_result
def made_of(
    steps: tuple[Any, ...],
    ends: tuple[Any, ...],
    shapes: tuple[tuple[int, ...], ...],
    types: tuple[str, ...],
    small: tuple[bool, ...],
) -> tuple[str, tuple[int, ...], tuple[int, ...]] | str:
    """The text of a mod, and which of the captured tensors and open numbers it takes, in its order; or why
    there is none."""
    tensors: list[Tensor] = [
        # Parameters are told apart by what they are, and not by their memory, which these do not have.
        torch.nn.Parameter(
            torch.empty(shape, dtype=getattr(torch, name.removeprefix("torch.")), device="meta"), False
        )
        for shape, name in zip(shapes, types, strict=True)
    ]
    score_mod, mask_mod = (None if end is None else _Again(steps, end, tensors, small) for end in ends)
    try:
        traced = trace(score_mod, mask_mod)
    except ModError as error:
        return str(error)
    places = tuple(next(i for i, x in enumerate(tensors) if x is found) for found in traced.tensors)
    return encoded(traced.mod), places, tuple(int(x) % _LARGE for x in traced.numbers)


class _Again:
    """Does with symbols what was noted. It is no function, so that its numbers are constants."""

    def __init__(
        self, steps: tuple[Any, ...], end: tuple[Any, ...], tensors: list[Tensor], small: tuple[bool, ...]
    ) -> None:
        self.__qualname__, self.first, last, self.end = end
        self.steps, self.tensors, self.small = steps[self.first : last], tensors, small

    def __call__(self, *symbols: Symbol) -> Any:
        recording = symbols[0]._recording
        values: list[Any] = []

        def operand(x: Any) -> Any:
            kind, data = x
            if kind == VALUE:
                return values[data - self.first]
            if kind == TENSOR:
                return self.tensors[data]
            if kind == NUMBER:
                number = data if self.small[data] else _LARGE + data
                return Symbol(recording, recording.number(number, (NUMBER, data)))
            return tuple(operand(y) for y in data) if kind == SEVERAL else data

        for function, args, named in self.steps:
            if isinstance(function, str):
                values.append(Symbol(recording, recording.builder.leaf(function)))
                continue
            given = tuple(operand(x) for x in args)
            if function in GET_ITEM and not isinstance(given[0], Symbol):
                values.append(gathered(recording, given[0], given[1]))
            elif _takes_symbols(function):
                values.append((random if function is RANDOM else function)(*given))
            else:
                keywords = {name: operand(x) for name, x in named}
                given = begun_with_a_value(function, given, keywords, recording)
                values.append(call(function, given, keywords))
        return operand(self.end)
