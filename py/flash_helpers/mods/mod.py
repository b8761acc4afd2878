"""A mod: what a user's functions of a score and its place compute, as a value.

It is a list of nodes, each of which names earlier ones, so that equal sub-expressions stand once. Two
functions that compute the same in the same way give equal mods, whatever numbers and tensors they capture:
those are arguments of a launch, and a mod knows their types alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from flash_helpers.mods.formula import written
from flash_helpers.mods.operations import INDICES, OPERATIONS, REDUCTIONS, Kind

MAX_NODES = 2048
MAX_DIMENSIONS = 5
SMALL_NUMBER = 2**30 - 1  # of 32 bits, so that sums of a few of them have 32 bits, too


class Element(Enum):
    """Element types of captured tensors: name in messages, type in C++ (``cpp.HEADER``), kind when loaded."""

    BOOL = ("bool", "flash::mods::Bool", Kind.BOOL)
    UINT8 = ("uint8", "uint8_t", Kind.INT)
    INT8 = ("int8", "int8_t", Kind.INT)
    INT16 = ("int16", "int16_t", Kind.INT)
    INT32 = ("int32", "int32_t", Kind.INT)
    INT64 = ("int64", "int64_t", Kind.INT)
    FP16 = ("float16", "flash::mods::Fp16", Kind.FLOAT)
    BF16 = ("bfloat16", "flash::mods::Bf16", Kind.FLOAT)
    FP32 = ("float32", "float", Kind.FLOAT)

    def __init__(self, label: str, cpp: str, kind: Kind) -> None:
        self.label, self.cpp, self.kind = label, cpp, kind


class Number(Enum):
    """The types of captured numbers. A whole number that is small needs 32 bits, as most do."""

    SMALL = ("int32_t", Kind.INT)
    LARGE = ("int64_t", Kind.INT)
    REAL = ("float", Kind.FLOAT)

    def __init__(self, cpp: str, kind: Kind) -> None:
        self.cpp, self.kind = cpp, kind

    @classmethod
    def of(cls, value: int | float) -> Number:
        """That of a value."""
        if isinstance(value, float):
            return cls.REAL
        return cls.SMALL if abs(value) <= SMALL_NUMBER else cls.LARGE


@dataclass(frozen=True)
class TensorType:
    """What a mod knows of a captured tensor."""

    element: Element
    n_dims: int


@dataclass(frozen=True)
class Node:
    """A value of a mod.

    Attributes:
        op: a leaf (``score``, an index ``b``, ``h``, ``q``, ``k``, ``constant``, ``number``, ``loop``), or an
            operation (``operations``).
        kind: of the value.
        args: the operands, as places in the mod's list.
        data: of a constant its value; of a number or a load its place among those captured; of a reduction
            its length.
    """

    op: str
    kind: Kind
    args: tuple[int, ...] = ()
    data: Any = None

    def key(self) -> tuple[Any, ...]:
        """What makes it the same node: 0.0 and -0.0 are two constants, and each NaN is the same."""
        data = repr(self.data) if isinstance(self.data, float) else self.data
        return (self.op, int(self.kind), self.args, data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())


@dataclass(frozen=True)
class TensorGradient:
    """How an element of a captured tensor changes the score.

    Attributes:
        slot: the tensor's place among those captured.
        value: name of the result that is the derivative of the score by the loaded element.
        indices: names of the results that are its indices, one a dimension.
        length: the load is made for each of so many values of ``loop``; None: once.
    """

    slot: int
    value: str
    indices: tuple[str, ...]
    length: int | None = None


@dataclass(frozen=True)
class Dropped:
    """Dropout in a kernel with a mod: where its captured values have what decides.

    Attributes:
        number: the place of the probability among the numbers.
        tensor: the place of the seed among the tensors.
    """

    number: int
    tensor: int


@dataclass(frozen=True)
class Mod:
    """The value of one or several functions.

    Attributes:
        nodes: operands before what takes them.
        results: names and places of what is computed: ``score`` (FLOAT), ``visible`` (BOOL), or derivatives.
        numbers: types of the captured numbers.
        tensors: types of the captured tensors.
        gradients: of a mod for gradients (``backward``), the loads of tensors whose gradients are wanted.
        dropped: weights are dropped behind the softmax (``dropped``); None: none are.
    """

    nodes: tuple[Node, ...]
    results: tuple[tuple[str, int], ...]
    numbers: tuple[Number, ...] = ()
    tensors: tuple[TensorType, ...] = ()
    gradients: tuple[TensorGradient, ...] = ()
    dropped: Dropped | None = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for place, node in enumerate(self.nodes):
            if any(not 0 <= arg < place for arg in node.args):
                raise ValueError(f"node {place} is {node}; its operands must stand before it")
            if node.op not in KNOWN:
                raise ValueError(f"node {place} is {node.op!r}; known are {', '.join(sorted(KNOWN))}")
        for name, place in self.results:
            if not 0 <= place < len(self.nodes):
                raise ValueError(f"result {name} is node {place} of {len(self.nodes)}")
        object.__setattr__(self, "_hash", hash(self._parts()))

    def _parts(self) -> tuple[Any, ...]:
        parts: tuple[Any, ...] = (self.nodes, self.results, self.numbers, self.tensors)
        if self.gradients or self.dropped:
            parts += (self.gradients,)
        return (*parts, self.dropped) if self.dropped else parts

    def __hash__(self) -> int:
        return self._hash

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Each process hashes text in its own way: a pickled mod gets the hash of this one."""
        self.__dict__.update(state)
        object.__setattr__(self, "_hash", hash(self._parts()))

    @cached_property
    def digest(self) -> int:
        """64 bits, never 0, that are the same for equal mods in every process."""
        return int(hashlib.sha256(repr(self._parts()).encode()).hexdigest()[:16], 16) or 1

    @property
    def id(self) -> str:
        """The digest as a word: a part of the names of kernels, and the name of the mod's struct in C++."""
        return f"mod_{self.digest:016x}"

    def __lt__(self, other: Mod) -> bool:
        """An order for lists of kernels, without a meaning."""
        return self.digest < other.digest

    @cached_property
    def gathered(self) -> tuple[int, ...]:
        """The places of the tensors in ``gradients``, each once."""
        return tuple(sorted({gradient.slot for gradient in self.gradients}))

    def result(self, name: str) -> int | None:
        """The place of a result; None: the mod has none of this name."""
        return dict(self.results).get(name)

    def uses(self, op: str) -> bool:
        """Whether a node is of this operation."""
        return any(node.op == op for node in self.nodes)

    def __str__(self) -> str:
        text = written(self.nodes, self.results)
        if self.dropped is None:
            return text
        number, tensor = self.dropped.number, self.dropped.tensor
        dropped = f"weight = 0 where random(t{tensor}, b, h, q, k) < n{number}, else weight / (1 - n{number})"
        return f"{text}\n{dropped}" if text else dropped


LEAVES = ("score", "constant", "number", "loop", *INDICES)
KNOWN = frozenset((*LEAVES, "where", "load", *OPERATIONS, *REDUCTIONS))
