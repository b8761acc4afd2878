"""The derivative of a mod, as a mod: of its score by the score that it is given and by what it loads.

Rules are those of torch: where two operands of a maximum are equal, each gets half; at the ends of a clamp a
derivative is 1; whole numbers have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flash_helpers.mods.builder import Builder
from flash_helpers.mods.mod import Mod, TensorGradient
from flash_helpers.mods.operations import Kind
from flash_helpers.mods.stages import loops


@dataclass(frozen=True)
class Derivative:
    """Derivatives of one score.

    Attributes:
        mod: with the same captured values; its result ``d_score`` is the derivative by the score.
        tensors: one for each load of a tensor that was asked for.
    """

    mod: Mod
    tensors: tuple[TensorGradient, ...]


def derivative(mod: Mod, wanted: tuple[int, ...] = (), kept: tuple[str, ...] = ()) -> Derivative:
    """The derivatives of the result ``score``.

    Args:
        mod: the mod.
        wanted: places of captured tensors of real numbers whose gradients are wanted.
        kept: results of the mod that are to be results here, too.
    """
    root = mod.result("score")
    if root is None:
        raise ValueError("the mod changes no score: there is nothing to differentiate")
    builder = Builder(mod.numbers, mod.tensors)
    places = builder.copy(mod)
    reverse = _Reverse(builder, mod, places)
    slopes = reverse.run(root)
    zero = builder.constant(0.0)
    score = next((i for i, node in enumerate(mod.nodes) if node.op == "score"), None)
    results = {"d_score": zero if score is None else slopes.get(score, zero)}
    results |= {name: places[place] for name, place in mod.results if name in kept}
    found: list[TensorGradient] = []
    for place, node in enumerate(mod.nodes):
        if node.op == "load" and node.data in wanted and place in slopes:
            number = len(found)
            names = tuple(f"index_{number}_{axis}" for axis in range(len(node.args)))
            results[f"d_load_{number}"] = slopes[place]
            results |= {name: places[arg] for name, arg in zip(names, node.args, strict=True)}
            found.append(TensorGradient(node.data, f"d_load_{number}", names, reverse.lengths.get(place)))
    return Derivative(builder.finish(results, all_captured=True), tuple(found))


class _Reverse:
    """Differentiation from the result to the leaves."""

    def __init__(self, builder: Builder, mod: Mod, places: list[int]) -> None:
        self.builder, self.mod, self.places = builder, mod, places
        self.lengths: dict[int, int] = {}  # of nodes within a sum, by their place
        self._looped = loops(mod)

    def run(self, root: int) -> dict[int, int]:
        """The derivative of a node by each real node that it depends on."""
        slopes: dict[int, int] = {root: self.builder.constant(1.0)}
        for place in range(root, -1, -1):
            node = self.mod.nodes[place]
            if place not in slopes or node.kind is not Kind.FLOAT or not node.args or node.op == "load":
                continue
            for arg, slope in zip(node.args, self._slopes(place, slopes[place]), strict=True):
                if slope is None or self.mod.nodes[arg].kind is not Kind.FLOAT:
                    continue
                length = node.data if node.op in _SUMS else self.lengths.get(place)
                if length is not None and self._looped[arg]:
                    self.lengths[arg] = length
                elif length is not None:  # the same operand in each step
                    slope = self.builder.reduce("sum", length, slope)
                slopes[arg] = self.builder.apply("add", slopes[arg], slope) if arg in slopes else slope
        return slopes

    def _slopes(self, place: int, slope: int) -> list[int | None]:
        node, builder = self.mod.nodes[place], self.builder
        args = [self.places[arg] for arg in node.args]
        if node.op == "where":
            zero = builder.constant(0.0)
            return [None, builder.where(args[0], slope, zero), builder.where(args[0], zero, slope)]
        if node.op in ("largest", "smallest"):
            # The value itself is what all equal operands share.
            value = self.places[place]
            same = builder.convert(builder.apply("eq", args[0], value), Kind.FLOAT)
            count = builder.reduce("sum", node.data, same)
            return [builder.apply("mul", same, builder.apply("divide", slope, count))]
        if node.op == "sum":
            return [slope]
        rule = _RULES.get(node.op)
        return [None] * len(args) if rule is None else rule(_Rules(builder, slope, self.places[place]), *args)


_SUMS = ("sum", "largest", "smallest")


class _Rules:
    """Arithmetic for the rules: ``slope`` is the derivative by the node, ``value`` the node."""

    def __init__(self, builder: Builder, slope: int, value: int) -> None:
        self.builder, self.slope, self.value = builder, slope, value

    def number(self, x: float) -> int:
        return self.builder.constant(float(x))

    def of(self, op: str, *args: int) -> int:
        return self.builder.apply(op, *args)

    def times(self, *factors: int) -> int:
        """The slope times all factors."""
        found = self.slope
        for factor in factors:
            found = self.of("mul", found, factor)
        return found

    def over(self, divisor: int) -> int:
        return self.of("divide", self.slope, divisor)

    def by_side(self, first: int, second: int) -> int:
        """The slope where ``first < second``, half of it where they are equal, else 0."""
        half = self.times(self.number(0.5))
        equal = self.of("eq", first, second)
        less = self.of("lt", first, second)
        return self.builder.where(less, self.slope, self.builder.where(equal, half, self.number(0.0)))


def _power(r: _Rules, a: int, b: int) -> list[int | None]:
    lower = r.of("pow", a, r.of("sub", b, r.number(1)))
    by_base = r.builder.where(r.of("eq", b, r.number(0)), r.number(0), r.times(b, lower))
    zero = r.of("and", r.of("eq", a, r.number(0)), r.of("le", r.number(0), b))
    by_exponent = r.builder.where(zero, r.number(0), r.times(r.value, r.of("log", a)))
    return [by_base, by_exponent]


def _sign(r: _Rules, a: int) -> list[int | None]:
    zero = r.number(0)
    negative = r.builder.where(r.of("lt", a, zero), r.times(r.number(-1)), zero)
    return [r.builder.where(r.of("lt", zero, a), r.slope, negative)]


def _one_minus_square(r: _Rules) -> int:
    return r.of("sub", r.number(1), r.of("mul", r.value, r.value))


_RULES: dict[str, Callable[..., list[int | None]]] = {
    "add": lambda r, a, b: [r.slope, r.slope],
    "sub": lambda r, a, b: [r.slope, r.of("neg", r.slope)],
    "mul": lambda r, a, b: [r.times(b), r.times(a)],
    "divide": lambda r, a, b: [r.over(b), r.of("neg", r.of("divide", r.times(r.value), b))],
    "remainder": lambda r, a, b: [r.slope, r.of("neg", r.times(r.of("floor_divide", a, b)))],
    "pow": _power,
    "neg": lambda r, a: [r.of("neg", r.slope)],
    "abs": _sign,
    "minimum": lambda r, a, b: [r.by_side(a, b), r.by_side(b, a)],
    "maximum": lambda r, a, b: [r.by_side(b, a), r.by_side(a, b)],
    "exp": lambda r, a: [r.times(r.value)],
    "exp2": lambda r, a: [r.times(r.value, r.number(math.log(2)))],
    "expm1": lambda r, a: [r.times(r.of("add", r.value, r.number(1)))],
    "log": lambda r, a: [r.over(a)],
    "log2": lambda r, a: [r.over(r.of("mul", a, r.number(math.log(2))))],
    "log1p": lambda r, a: [r.over(r.of("add", a, r.number(1)))],
    "sqrt": lambda r, a: [r.over(r.of("mul", r.value, r.number(2)))],
    "rsqrt": lambda r, a: [r.times(r.number(-0.5), r.value, r.of("mul", r.value, r.value))],
    "tanh": lambda r, a: [r.times(_one_minus_square(r))],
    "sigmoid": lambda r, a: [r.times(r.value, r.of("sub", r.number(1), r.value))],
    "erf": lambda r, a: [
        r.times(r.number(2 / math.sqrt(math.pi)), r.of("exp", r.of("neg", r.of("mul", a, a))))
    ],
    "sin": lambda r, a: [r.times(r.of("cos", a))],
    "cos": lambda r, a: [r.of("neg", r.times(r.of("sin", a)))],
}
"""What is not listed has the derivative 0: comparisons, ``floor`` and its like, whole numbers."""
