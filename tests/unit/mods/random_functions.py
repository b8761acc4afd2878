"""Random score and mask functions, as a user writes them: the text of one, made a function by ``exec``.

They can be called with symbols and with tensors alike. Indices stay within the tables, divisors are not 0.
Products
of whole and real numbers have the default type, which a test sets to float64.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

BATCH, HEADS, SEQ = 2, 3, 11


def tables(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Captured tensors of every element type, 0 to 4 dimensions, some with broadcast or swapped strides."""

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-9, 10, shape, generator=generator)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    return {
        "doc": whole(SEQ).to(torch.int32),
        "pairs": whole(SEQ, SEQ).to(torch.int16).T,
        "far": whole(BATCH, SEQ) * 2**33,
        "small": whole(HEADS).to(torch.int8),
        "byte": whole(SEQ).abs().to(torch.uint8)[:, None].expand(SEQ, 4),
        "seen": whole(SEQ, SEQ) > 0,
        "slopes": real(HEADS).to(torch.float16),
        "bias": real(1, HEADS, SEQ, SEQ).expand(BATCH, HEADS, SEQ, SEQ).to(torch.bfloat16),
        "distance": real(HEADS, 2 * SEQ - 1),
        "one": real(()),
    }


LOADS = {  # by the kind of what they give: table and its indices
    "int": ["doc[{q}]", "doc[{k}]", "pairs[{q}, {k}]", "far[b, {q}]", "small[h]", "byte[{k}, 3]"],
    "bool": ["seen[{q}, {k}]"],
    "float": ["slopes[h]", "bias[b, h, {q}, {k}]", "distance[h, q - k + 10]", "one"],
}


class Writer:
    """Writes one expression.

    Attributes:
        smooth: real numbers are neither compared nor rounded: float32 and float64 agree then.
    """

    def __init__(self, seed: int, scored: bool, smooth: bool = False) -> None:
        self.random = random.Random(seed)
        self.real = "score" if scored else "slopes[h]"
        self.smooth = smooth

    def index(self, depth: int) -> str:
        if depth <= 0 or self.random.random() < 0.5:
            return self.random.choice("qk")
        return f"(({self.int(depth - 1)}) % {SEQ})"

    def load(self, kind: str, depth: int) -> str:
        pattern = self.random.choice(LOADS[kind])
        return pattern.replace("{q}", self.index(depth)).replace("{k}", self.index(depth))

    def int(self, depth: int) -> str:
        if depth <= 0:
            return self.random.choice(
                ["b", "h", "q", "k", "q", "k", "n0", "n1", str(self.random.randint(-7, 9))]
            )
        a, b = (lambda: self.int(depth - 1)), (lambda: self.int(depth - 1))
        n = self.random.randint(1, 9)
        choices = [
            lambda: f"({a()} + {b()})",
            lambda: f"({a()} - {b()})",
            lambda: f"({a()} * {b()})",
            lambda: f"({a()} // {n})",
            lambda: f"({a()} % {n})",
            lambda: f"({a()} % -{n})",
            lambda: f"({a()} // -{n})",
            lambda: f"({a()} // (torch.abs({self.value_int(depth - 1)}) + 1))",
            lambda: f"({a()} & {b()})",
            lambda: f"({a()} | {b()})",
            lambda: f"({a()} ^ {b()})",
            lambda: f"({a()} << {n % 5})",
            lambda: f"({a()} >> {n % 5})",
            lambda: f"torch.abs({self.value_int(depth - 1)})",
            lambda: f"(-{self.value_int(depth - 1)})",
            lambda: f"(~{self.value_int(depth - 1)})",
            lambda: f"(~{self.value_int(depth - 1)})",
            lambda: f"torch.clamp({self.value_int(depth - 1)}, {-n}, {n})",
            lambda: f"torch.minimum({self.value_int(depth - 1)}, {self.value_int(depth - 1)})",
            lambda: f"torch.maximum({self.value_int(depth - 1)}, {self.value_int(depth - 1)})",
            lambda: f"torch.where({self.value_bool(depth - 1)}, {a()}, {b()})",
            lambda: f"({self.value_bool(depth - 1)}).long()",
            lambda: f"({self.value_int(depth - 1)} ** 2)",
            lambda: self.load("int", depth - 1),
            lambda: self.load("int", depth - 1),
        ]
        return self.random.choice(choices)()

    def value_int(self, depth: int) -> str:
        """A whole number that is no number of Python's, as the functions of torch want it."""
        return f"(q + {self.int(depth)})"

    def bool(self, depth: int) -> str:
        a, b = (lambda: self.int(depth - 1)), (lambda: self.int(depth - 1))
        sign = self.random.choice(["<", "<=", ">", ">=", "==", "!="])
        choices = [lambda: f"({self.value_int(depth - 1)} {sign} {b()})"]
        if depth > 0:
            choices += [
                lambda: f"({a()} {sign} {self.value_int(depth - 1)})",
                lambda: f"({self.value_bool(depth - 1)} & {self.value_bool(depth - 1)})",
                lambda: f"({self.value_bool(depth - 1)} | {self.value_bool(depth - 1)})",
                lambda: f"({self.value_bool(depth - 1)} ^ {self.value_bool(depth - 1)})",
                lambda: f"torch.logical_and({self.value_bool(depth - 1)}, {self.value_int(depth - 1)})",
                lambda: f"(~{self.value_bool(depth - 1)})",
                lambda: self.load("bool", depth - 1),
            ]
            if not self.smooth:
                choices.append(lambda: f"({self.value_float(depth - 1)} {sign} {self.float(depth - 1)})")
        return self.random.choice(choices)()

    value_bool = bool

    def float(self, depth: int) -> str:
        if depth <= 0:
            return self.random.choice(
                [self.real, self.real, "x0", "slopes[h]", repr(round(self.random.uniform(-2, 2), 2))]
            )
        a, b = (lambda: self.float(depth - 1)), (lambda: self.float(depth - 1))
        v = lambda: self.value_float(depth - 1)  # noqa: E731
        choices = [
            lambda: f"({a()} + {b()})",
            lambda: f"({a()} - {b()})",
            lambda: f"({a()} * {b()})",
            lambda: f"({v()} / (torch.abs({v()}) + 0.5))",
            lambda: f"torch.tanh({v()})",
            lambda: f"torch.sigmoid({v()})",
            lambda: f"torch.exp(-torch.abs({v()}))",
            lambda: f"torch.exp2(torch.clamp({v()}, -4.0, 4.0))",
            lambda: f"torch.log(torch.abs({v()}) + 1.5)",
            lambda: f"torch.sqrt({v()} ** 2 + 1.0)",
            lambda: f"torch.rsqrt({v()} ** 2 + 0.5)",
            lambda: f"torch.sin({v()})",
            lambda: f"torch.cos({v()})",
            lambda: f"torch.erf({v()})",
            lambda: f"torch.nn.functional.gelu({v()})",
            lambda: f"torch.nn.functional.silu({v()})",
            lambda: f"torch.where({self.value_bool(depth - 1)}, {v()}, {b()})",
            lambda: f"torch.maximum({v()}, {v()})",
            lambda: f"torch.relu({v()})",
            lambda: f"torch.abs({v()})",
            lambda: f"({self.value_int(depth - 1)} * 0.01)",
            lambda: f"(-{v()})",
            lambda: self.load("float", depth - 1),
            lambda: self.load("float", depth - 1),
        ]
        if not self.smooth:
            choices += [
                lambda: f"torch.floor({v()})",
                lambda: f"torch.round({v()})",
                lambda: f"({v()} % 1.5)",
                lambda: f"({v()} // 0.7)",
                lambda: f"({v()}).long() * 0.5",
            ]
        return self.random.choice(choices)()

    def value_float(self, depth: int) -> str:
        return f"({self.real} + {self.float(depth)})"


class Made(NamedTuple):
    """A random function.

    Attributes:
        text: what it returns.
        function: it; it captures its numbers and tables in a closure.
    """

    text: str
    function: Callable[..., Any]


def function(
    seed: int, kind: str, captured: dict[str, torch.Tensor], depth: int = 4, smooth: bool = False
) -> Made:
    """A score function (``kind`` is ``score``) or a mask function (``mask``)."""
    scored = kind == "score"
    writer = Writer(seed, scored, smooth)
    text = writer.value_float(depth) if scored else writer.value_bool(depth)
    names = ["n0", "n1", "x0", *captured]
    arguments = "score, b, h, q, k" if scored else "b, h, q, k"
    source = (
        f"def make({', '.join(names)}):\n    def mod({arguments}):\n        return {text}\n    return mod\n"
    )
    namespace: dict[str, Any] = {"torch": torch}
    exec(source, namespace)
    numbers = (writer.random.randint(-20, 20), writer.random.randint(1, 8), writer.random.uniform(-2, 2))
    return Made(text, namespace["make"](*numbers, *captured.values()))


def grid(generator: torch.Generator, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Scores (BATCH, HEADS, SEQ, SEQ) and their indices, of shapes that broadcast to it."""
    score = torch.randn(BATCH, HEADS, SEQ, SEQ, generator=generator, dtype=torch.float64).to(dtype)
    b, h = torch.arange(BATCH)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    return score, b, h, torch.arange(SEQ)[:, None], torch.arange(SEQ)
