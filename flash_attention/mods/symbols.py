"""What a user's function is called with: symbols, which record what is done with them.

A ``Symbol`` stands for one value, or, with a length, for a row of values as ``table[b, h]`` gives one. A
``Gathered`` is a captured tensor with some of its indices given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flash_attention.mods.recording import Recording
from flash_attention.mods.refusal import refused
from flash_attention.mods.registry import (
    METHODS,
    NOTHING_WRITTEN,
    RULES,
    call,
    call_named,
    in_place,
    is_in_place,
    name_of,
    unknown,
)
from flash_helpers.mods.operations import Kind

_DTYPES = {Kind.BOOL: torch.bool, Kind.INT: torch.int64, Kind.FLOAT: torch.float32}
_NUMPY = "Take functions of torch, and capture torch.from_numpy(array) in place of an array"
_UFUNCS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "floor_divide": "floor_divide",
    "remainder": "remainder", "power": "pow", "bitwise_and": "bitwise_and", "bitwise_or": "bitwise_or",
    "bitwise_xor": "bitwise_xor", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
    "equal": "eq", "not_equal": "ne",
}  # fmt: skip
_INDEXING = ("__getitem__", "index", "select")
WHERE = (
    "Write torch.where(condition, a, b); in place of and, or, not write &, |, ~; in place of a < b < c "
    "(a < b) & (b < c); in place of min, max write torch.minimum, torch.maximum; in place of x in (1, 2) "
    "(x == 1) | (x == 2)"
)


class Symbol:
    """One value, or a row of values, of a recording."""

    def __init__(self, recording: Recording, place: int, length: int | None = None) -> None:
        self._recording, self._place, self._length = recording, place, length

    def value(self) -> tuple[int, int | None]:
        """Its node, and its length; None: one value."""
        return self._place, self._length

    # ------------------------------------------------------------------ what a tensor says of itself
    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self._recording.builder.kind(self.value()[0])]

    @property
    def shape(self) -> torch.Size:
        length = self.value()[1]
        return torch.Size(() if length is None else (length,))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def device(self) -> torch.device:
        if self._recording.device is None:
            raise refused("the device of a symbol is not known here", "Take that of a captured tensor")
        return self._recording.device

    # ------------------------------------------------------------------ what is refused
    def __bool__(self) -> bool:
        place, length = self.value()
        node = self._recording.builder.nodes[place]
        if node.op == "constant" and length is None:
            return bool(node.data)
        raise refused("the function branches on a value that differs from score to score", WHERE)

    def __index__(self) -> int:
        raise refused(
            "Python needs a number where the function has a value that differs from score to score",
            "Loops, sizes and indices of lists need numbers; a tensor is indexed by tensor[value]",
        )

    def _no_float(self, *_: Any) -> Any:
        raise refused(
            "a function of Python's takes a value that differs from score to score",
            "Take the function of that name in torch, e.g. torch.exp; .long() and .float() convert",
        )

    __float__ = __int__ = __complex__ = __trunc__ = __floor__ = __ceil__ = __round__ = _no_float
    item = tolist = numpy = __format__ = _no_float

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise refused("NumPy takes a value that differs from score to score", _NUMPY)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
        """An operator with a number of NumPy's on its left."""
        name = _UFUNCS.get(ufunc.__name__)
        if name is None or method != "__call__" or keywords:
            raise refused(f"{ufunc.__name__} of NumPy takes a value that differs from score to score", _NUMPY)
        return call_named(name, inputs, {})

    def __setitem__(self, *_: Any) -> None:
        raise refused("the function writes to a value", NOTHING_WRITTEN)

    def __contains__(self, _: Any) -> bool:
        raise refused("`in` looks for a value in a row", "Write (row == value).any(-1)")

    def __len__(self) -> int:
        return len(self._row("the length of one value is asked for"))

    def __iter__(self) -> Iterator[Any]:
        row = self._row("one value is unpacked or looped over")
        return (self[i] for i in row)

    def _row(self, what: str) -> range:
        if not self.shape:
            raise refused(what, "Only rows, as table[b] gives one, have a length")
        return range(self.shape[0])

    def __repr__(self) -> str:
        return f"<a value of a mod, {self.dtype}>"

    def __hash__(self) -> int:
        raise refused(
            "a dictionary, a set or a cache looks up a value that differs from score to score",
            "Capture a tensor and index it",
        )

    # ------------------------------------------------------------------ what is recorded
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_in_place(function):
            raise in_place(function.__name__.partition(".")[0])
        return call(function, begun_with_a_value(function, args, kwargs or {}), kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        place, length = self.value()
        if isinstance(index, tuple) and len(index) == 1:
            (index,) = index
        if index is None and length is None:
            return Symbol(self._recording, place, 1)
        if index is Ellipsis or (isinstance(index, tuple) and not index):
            return self
        raise refused(f"a value of {self.ndim} dimensions is indexed", "Index captured tensors")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in RULES:
            raise in_place(name) if name.endswith("_") else unknown(f"the method .{name}")
        return lambda *args, **kwargs: call_named(METHODS.get(name, name), (self, *args), kwargs)


class Gathered(Symbol):
    """A captured tensor with indices for its first dimensions; None stands for a whole dimension."""

    def __init__(self, recording: Recording, tensor: Tensor, indices: list[int | None]) -> None:
        self._recording, self._tensor, self._indices = recording, tensor, indices

    @property
    def _open(self) -> list[int]:
        return [axis for axis, index in enumerate(self._indices) if index is None]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._tensor.shape[axis] for axis in self._open)

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    def value(self) -> tuple[int, int | None]:
        if len(self._open) != 1:
            raise refused(
                f"{len(self._open)} dimensions of a captured tensor have no index where a value is needed",
                "Give it an index for each dimension, or leave one open and reduce the row by .any(-1), "
                ".sum(-1) or torch.dot",
            )
        (axis,) = self._open
        builder, length = self._recording.builder, self._tensor.shape[axis]
        step = builder.constant(0) if length == 1 else builder.leaf("loop")
        indices = [step if index is None else index for index in self._indices]
        return self._recording.load(self._recording.slot(self._tensor), indices), length

    def __getitem__(self, index: Any) -> Any:
        return gathered(self._recording, self._tensor, index, self._indices)


def gathered(
    recording: Recording, tensor: Tensor, index: Any, before: list[int | None] | None = None
) -> Symbol:
    """``tensor[index]``, where the index holds symbols.

    Args:
        before: the indices that it was given before.
    """
    indices: list[int | None] = [None] * tensor.ndim if before is None else list(before)
    given = list(index) if isinstance(index, tuple | list) else [index]
    axes = [axis for axis, old in enumerate(indices) if old is None]
    if Ellipsis in [x for x in given if not isinstance(x, Symbol | Tensor)]:
        at = next(i for i, x in enumerate(given) if x is Ellipsis)
        given[at : at + 1] = [slice(None)] * (len(axes) - len(given) + 1)
    if len(given) > len(axes):
        raise refused(
            f"{len(given)} indices for a captured tensor that has {len(axes)} dimensions left",
            "Give it fewer",
        )
    length: int | None = None
    for axis, x in zip(axes, given, strict=False):
        if isinstance(x, slice):
            if x.start is None and x.stop is None and x.step is None:
                continue
            raise refused(
                "a captured tensor is indexed by a slice and values",
                "Slice it before the function, or give one index; of several sum the values one by one",
            )
        place, n = index_of(recording, x)
        if n is not None and length not in (None, 1, n):
            raise refused(
                f"rows of {length} and of {n} values index one tensor", "Rows must be of one length"
            )
        length = n if n is not None else length
        indices[axis] = place
    if None in indices:
        if length is not None:
            raise refused(
                "a row indexes a tensor that has more dimensions", "Give it an index for each dimension"
            )
        return Gathered(recording, tensor, indices)
    return Symbol(
        recording, recording.load(recording.slot(tensor), [i for i in indices if i is not None]), length
    )


def begun_with_a_value(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recording: Recording | None = None
) -> tuple[Any, ...]:
    """The arguments of a function of PyTorch. A captured tensor or row that is the first of them becomes a
    value, which rules compute with as with others. Where it is indexed, it stays.

    Args:
        recording: takes it; None: that of the values among the arguments.
    """
    if not args or not isinstance(args[0], Tensor) or args[0].ndim > 1 or name_of(function) in _INDEXING:
        return args
    if recording is None:
        symbol = next((x for x in (*args, *kwargs.values()) if isinstance(x, Symbol)), None)
        if symbol is None:
            return args
        recording = symbol._recording
    first = args[0]
    if first.ndim == 1:
        return (gathered(recording, first, slice(None)), *args[1:])
    return (Symbol(recording, recording.scalar_tensor(first)), *args[1:])


def index_of(recording: Recording, x: Any) -> tuple[int, int | None]:
    """An index as a node."""
    if isinstance(x, Symbol):
        place, length = x.value()
    elif isinstance(x, Tensor):
        place, length = recording.scalar_tensor(x), None
    else:
        found = None if isinstance(x, bool) else recording.python_number(x)
        if found is None:
            raise refused(
                f"a captured tensor is indexed by {type(x).__name__} {x!r}",
                "Indices are whole numbers, values made of b, h, q_idx and kv_idx, or `:`",
            )
        place, length = found, None
    return place, length
