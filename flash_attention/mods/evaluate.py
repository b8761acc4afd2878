"""The values of a mod, computed with PyTorch for whole blocks of scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from flash_attention.mods.philox import random_reals
from flash_attention.mods.tracing import Traced
from flash_helpers.mods.mod import Node
from flash_helpers.mods.operations import LARGEST_INT, REDUCTIONS, Kind
from flash_helpers.mods.stages import loops, needed


def evaluate(
    traced: Traced,
    result: str,
    score: Tensor | None,
    b: Tensor,
    h: Tensor,
    q: Tensor,
    k: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    step: int | None = None,
) -> Tensor:
    """A result of a mod.

    Args:
        traced: the mod with what it captured.
        result: its name.
        score: scores, of any shape that broadcasts with the indices; None: the result needs none.
        b, h, q, k: whole numbers, of shapes that broadcast.
        dtype: type in which real numbers are computed.
        step: of a result within a sum, the step.

    Returns:
        the values, of the shape that what they depend on broadcasts to.
    """
    place = traced.mod.result(result)
    if place is None:
        names = ", ".join(name for name, _ in traced.mod.results)
        raise ValueError(f"the mod has no result {result!r}; it has {names}")
    leaves: dict[str, Any] = {"score": None if score is None else score.to(dtype)}
    leaves |= {"b": b.long(), "h": h.long(), "q": q.long(), "k": k.long()}
    return _Evaluation(traced, dtype, leaves, b.device).value(place, needed(traced.mod, result), step)


class _Evaluation:
    def __init__(
        self, traced: Traced, dtype: torch.dtype, leaves: dict[str, Any], device: torch.device
    ) -> None:
        self.traced, self.dtype, self.leaves, self.device = traced, dtype, leaves, device
        self.nodes = traced.mod.nodes
        self.inside = loops(traced.mod)
        self.values: dict[int, Tensor] = {}

    def value(self, root: int, wanted: list[bool], step: int | None) -> Tensor:
        with torch.no_grad():
            for place in range(root + 1):
                if wanted[place] and not self.inside[place]:
                    self.values[place] = self._node(place)
            if self.inside[root]:
                if step is None:
                    raise ValueError("the result is one within a sum; say at which step")
                self._steps(self._body(root), step)
            return self.values[root]

    def _node(self, place: int) -> Tensor:
        node = self.nodes[place]
        if node.op in REDUCTIONS:
            return self._reduced(node)
        if node.op in self.leaves:
            return self.leaves[node.op]  # type: ignore[no-any-return]
        if node.op in ("constant", "number"):
            value = node.data if node.op == "constant" else self.traced.numbers[node.data]
            return torch.tensor(value, dtype=self._dtype(node.kind), device=self.device)
        args: list[Any] = [self.values[arg] for arg in node.args]
        if node.op == "load":
            return self._load(node, args)
        if node.op == "where":
            return torch.where(*args)
        if node.op == "random":
            return random_reals(self.dtype, *args)
        if node.op == "to_float":
            return args[0].to(self.dtype)
        return _OPERATIONS[node.op](*args)

    def _dtype(self, kind: Kind) -> torch.dtype:
        return {Kind.BOOL: torch.bool, Kind.INT: torch.int64, Kind.FLOAT: self.dtype}[kind]

    def _load(self, node: Node, indices: list[Tensor]) -> Tensor:
        """An element; outside of the tensor 0, and nothing is read."""
        tensor = self.traced.tensors[node.data]
        kind = self._dtype(node.kind)
        if not indices:
            return tensor.to(kind)
        inside = torch.ones((), dtype=torch.bool, device=self.device)
        places = []
        for index, size in zip(indices, tensor.shape, strict=True):
            index = torch.where(index < 0, index + size, index)
            within = (index >= 0) & (index < size)
            inside = inside & within
            places.append(torch.where(within, index, 0))
        if not tensor.numel():
            return torch.zeros_like(inside, dtype=kind)
        return torch.where(
            inside, tensor[tuple(places)].to(kind), torch.zeros((), dtype=kind, device=self.device)
        )

    # ------------------------------------------------------------------ loops
    def _body(self, root: int) -> list[int]:
        """What is computed anew in each step of a loop."""
        found: set[int] = set()
        waiting = [root]
        while waiting:
            place = waiting.pop()
            if self.inside[place] and place not in found:
                found.add(place)
                waiting.extend(self.nodes[place].args)
        return sorted(found)

    def _steps(self, body: Iterable[int], step: int) -> None:
        for place in body:
            if self.nodes[place].op == "loop":
                self.values[place] = torch.tensor(step, device=self.device)
            else:
                self.values[place] = self._node(place)

    def _reduced(self, node: Node) -> Tensor:
        (root,) = node.args
        body = self._body(root)
        join = _REDUCTIONS[node.op]
        total: Tensor | None = None
        for step in range(node.data):
            self._steps(body, step)
            total = self.values[root] if total is None else join(total, self.values[root])
        if total is None:
            return torch.tensor(node.op == "all", device=self.device).to(self._dtype(node.kind))
        return total


# ---------------------------------------------------------------------- operations
def _to_int(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x.long()
    return x.nan_to_num(0.0, LARGEST_INT, -LARGEST_INT).clamp(-LARGEST_INT, LARGEST_INT).trunc().long()


def _floor_divide(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return torch.floor_divide(a, b)
    # -2^63 // -1 wraps around, which PyTorch's own division does not survive.
    by = torch.where((b == 0) | (b == -1), 1, b)
    quotient = torch.div(a, by, rounding_mode="floor")
    return torch.where(b == 0, 0, torch.where(b == -1, -a, quotient))


def _remainder(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return torch.remainder(a, b)
    return torch.where((b == 0) | (b == -1), 0, torch.remainder(a, torch.where((b == 0) | (b == -1), 1, b)))


def _shift_left(a: Tensor, count: Tensor) -> Tensor:
    known = (count >= 0) & (count < 64)
    return torch.where(known, a << torch.where(known, count, 0), 0)


def _shift_right(a: Tensor, count: Tensor) -> Tensor:
    return a >> torch.where((count >= 0) & (count < 64), count, 63)


_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "divide": torch.div, "pow": torch.pow,
    "floor_divide": _floor_divide, "remainder": _remainder,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "not": torch.bitwise_not,
    "shift_left": _shift_left, "shift_right": _shift_right,
    "lt": torch.lt, "le": torch.le, "eq": torch.eq, "ne": torch.ne,
    "neg": torch.neg, "abs": torch.abs, "minimum": torch.minimum, "maximum": torch.maximum,
    "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log2": torch.log2, "log1p": torch.log1p,
    "expm1": torch.expm1, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf, "sin": torch.sin, "cos": torch.cos, "floor": torch.floor, "ceil": torch.ceil,
    "round": torch.round, "trunc": torch.trunc,
    "to_int": _to_int, "to_bool": lambda x: x != 0,
}  # fmt: skip
_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "any": torch.logical_or, "all": torch.logical_and, "sum": torch.add,
    "largest": torch.maximum, "smallest": torch.minimum,
}  # fmt: skip
