"""Recording ``score_mod`` and ``mask_mod`` while ``torch.compile`` follows the call of ``attention``.

The compiler follows Python and guards what it reads: closures, globals, attributes. So the functions are
called with tensors of no dimension, and a mode notes what is done with them, which the compiler follows as it
follows the user's own code. They are meta tensors, so that no branch on a value can be taken. What was noted
is a constant of the program. It is done again with symbols (``noted``), outside of the compiler: there is
one table of rules. Captured tensors are tensors of the program, numbers that it holds open are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flash_attention.errors import ModError
from flash_attention.mods.noted import (
    CONSTANT,
    GET_ITEM,
    NUMBER,
    SEVERAL,
    TENSOR,
    VALUE,
    has_rule,
    made_of,
    no_rule,
)
from flash_attention.mods.randomness import OPERATOR as RANDOM
from flash_attention.mods.recording import UNDER_NO_GRAD
from flash_attention.mods.registry import NOTHING_WRITTEN, is_in_place
from flash_attention.mods.tracing import SIGNATURES, not_callable
from flash_helpers.mods.mod import SMALL_NUMBER

_WRITES = f"the function writes to a captured tensor. {NOTHING_WRITTEN}"
_STOPPED = ". ".join(UNDER_NO_GRAD)
_UNSEEN = (
    "a value comes from what is not seen in a program that is compiled: a row is unpacked or looped over, "
    "or Python's abs is called. Index it, e.g. row[0] and row[1], or pass a tensor that has memory; write "
    "x.abs()"
)
# What a value says of itself; ``len`` asks for a size.
_FACTS = (
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.numel, torch.is_floating_point
)  # fmt: skip


class InGraph(NamedTuple):
    """A mod as a program holds it.

    Attributes:
        text: the mod (``flash_helpers.mods.encoding``).
        tensors: what it captured.
        numbers: whole numbers that it captured, as far as the program holds them open.
    """

    text: str
    tensors: list[Tensor]
    numbers: list[int]


def recorded_in_graph(
    score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None, device: torch.device
) -> InGraph:
    """``trace`` for a program that is being compiled.

    Numbers that the compiler knows are a part of the mod; those that it holds open (``torch.SymInt``) are
    arguments, and real ones captured tensors.
    """
    notes = _Notes(device)
    ends = [notes.of(name, function) for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod))]
    shapes = tuple([notes.shape(i) for i in range(len(notes.tensors))])
    types = tuple([str(x.dtype) for x in notes.tensors])
    small = tuple([_is_small(x) for x in notes.numbers])
    made = made_of(tuple(notes.steps), tuple(ends), shapes, types, small)
    if isinstance(made, str):
        raise ModError(made)
    text, tensors, numbers = made
    return InGraph(text, [notes.tensors[i] for i in tensors], [notes.numbers[i] for i in numbers])


# ---------------------------------------------------------------------- what the compiler follows
class _Notes(TorchFunctionMode):
    """Notes what functions do with some tensors that stand for their values.

    Attributes:
        steps: (function, operands, keywords) or, of a leaf, (its name, (), ()).
        tensors: captured ones.
        numbers: whole numbers that the program holds open.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.is_differentiated = device, torch.is_grad_enabled()
        self.steps: list[Any] = []
        self.tensors: list[Tensor] = []
        self.numbers: list[int] = []
        self._sizes: dict[tuple[int, int], int] = {}  # of a tensor and an axis, where it was asked for
        self._places: dict[Tensor, int] = {}

    def of(self, name: str, function: Callable[..., Any] | None) -> Any:
        """Calls a function; gives its result as an operand, or None where there is no function."""
        if function is None:
            return None
        if not callable(function):
            raise TypeError(not_callable(name, function))
        first = len(self.steps)
        leaves = [self._leaf(leaf) for leaf in SIGNATURES[name]]
        with self:
            result = function(*leaves)
        called = function.__name__ if hasattr(function, "__name__") else name
        return called, first, len(self.steps), self._operand(result)

    def shape(self, i: int) -> tuple[int, ...]:
        """Sizes of a captured tensor, as far as the mod depends on them; 1 stands for others."""
        return tuple([self._sizes.get((i, axis), 1) for axis in range(self.tensors[i].ndim)])

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_noted(args) and not self._is_noted(tuple(kwargs.values())):
            if function in GET_ITEM and self._is_unseen(args[1:]):
                raise ModError(_UNSEEN)
            # A function that makes a tensor where a value is, or takes one there, means the call's device.
            kwargs = {name: self._where(x) for name, x in kwargs.items()}
            return function(*[self._where(x) for x in args], **kwargs)
        if function.__name__ in (
            "__get__",
            "__repr__",
        ):  # an attribute, such as a type; PyTorch's own messages
            return function(*args)
        if function in _FACTS:
            return function(*args, **kwargs)
        if function in GET_ITEM:
            return self._index(args[0], args[1])
        if is_in_place(function) and not self._is_noted(args[:1]):
            raise ModError(_WRITES)  # what it writes is read elsewhere
        named = tuple([(name, self._operand(x)) for name, x in kwargs.items()])
        step = (function, tuple([self._operand(x) for x in args]), named)
        if not has_rule(function):  # refused here, so that the compiler shows the user's line
            raise ModError(no_rule(function))
        if function is RANDOM:
            return self._note(torch.empty((), dtype=torch.float32, device="meta"), step)
        args = tuple([self._stand_in(x) for x in args])
        kwargs = {name: self._stand_in(x) for name, x in kwargs.items()}
        made = function(*args, **kwargs)
        is_stopped = self.is_differentiated and not torch.is_grad_enabled()
        if is_stopped and isinstance(made, Tensor) and made.is_floating_point():
            raise ModError(_STOPPED)
        return self._note(made, step)

    def _leaf(self, name: str) -> Tensor:
        kind = torch.float32 if name == "score" else torch.int64
        return self._note(torch.empty((), dtype=kind, device="meta"), (name, (), ()))

    def _stand_in(self, x: Any) -> Any:
        """A captured tensor without its values, to find out of what type and shape a result is."""
        return torch.empty_like(x, device="meta") if isinstance(x, Tensor) and x not in self._places else x

    def _note(self, made: Any, step: Any) -> Any:
        """A tensor as the result of a step. What is no tensor, as ``x.dtype``, stays what it is."""
        if isinstance(made, Tensor):
            self._places[made] = len(self.steps)
            self.steps.append(step)
        return made

    def _is_noted(self, values: Iterable[Any]) -> bool:
        for x in values:
            if isinstance(x, Tensor):
                if x in self._places:
                    return True
            elif isinstance(x, tuple | list) and self._is_noted(x):
                return True
        return False

    def _where(self, x: Any) -> Any:
        """An argument of a function; in the place of the device that values have, that of the call."""
        if isinstance(x, str):
            return self.device if x == "meta" else x
        return self.device if isinstance(x, torch.device) and x.type == "meta" else x

    def _is_unseen(self, values: Iterable[Any]) -> bool:
        """Whether a value is among them that was made where no mode saw it."""
        for x in values:
            if isinstance(x, tuple | list):
                if self._is_unseen(x):
                    return True
            elif isinstance(x, Tensor) and x.is_meta and self.device.type != "meta":
                return True
        return False

    def _index(self, table: Tensor, index: Any) -> Tensor:
        """``table[index]``. PyTorch would read an index of no dimension."""
        given = index if isinstance(index, tuple | list) else (index,)
        several = (SEVERAL, tuple([self._operand(x) for x in given]))
        place = self._operand(table, is_table=True)
        n_given = len([x for x in given if x is not Ellipsis and x is not None])
        rows: list[int] = []
        axis = 0
        for x in given:
            if x is None:
                rows.append(1)
            elif x is Ellipsis or isinstance(x, slice):
                for _ in range(table.ndim - n_given if x is Ellipsis else 1):
                    rows.append(self._size(place, table, axis))
                    axis += 1
            else:
                if isinstance(x, Tensor) and x.ndim == 1:
                    rows.append(x.shape[0])
                axis += 1
        while axis < table.ndim:
            rows.append(self._size(place, table, axis))
            axis += 1
        made = torch.empty(rows, dtype=table.dtype, device="meta")
        return self._note(made, (Tensor.__getitem__, (place, several), ()))

    def _size(self, place: Any, table: Tensor, axis: int) -> int:
        """A size on which the mod depends: a program that holds it open is made for this one."""
        size = _closed(table.shape[axis])
        if place[0] == TENSOR:
            self._sizes[(place[1], axis)] = size
        return size

    def _operand(self, x: Any, is_table: bool = False) -> Any:
        if isinstance(x, Tensor):
            if x in self._places:
                return (VALUE, self._places[x])
            return (TENSOR, self._captured(x, is_table))
        if isinstance(x, tuple | list):
            return (SEVERAL, tuple([self._operand(y) for y in x]))
        if isinstance(x, (np.ndarray, np.generic)):  # a number of NumPy's, which the program holds open
            number = torch.as_tensor(x)
            number = number.to(torch.float32) if number.is_floating_point() else number
            return (TENSOR, self._captured(number, False))
        if isinstance(x, int | float) and not isinstance(x, bool):
            if _is_known(x):
                return (CONSTANT, _closed(x) if type(x) in (int, float) else x)
            if isinstance(x, float):  # PyTorch holds products with such a number open, and little else
                number = torch.ones((), dtype=torch.float32, device=self.device) * x
                return (TENSOR, self._captured(number, False))
            self.numbers.append(x)
            return (NUMBER, len(self.numbers) - 1)
        return (CONSTANT, x)

    def _captured(self, x: Tensor, is_table: bool) -> int:
        if x.is_meta and self.device.type != "meta":  # made of a value, where no mode saw it
            raise ModError(_UNSEEN)
        if x.ndim == 0 and x.device.type == "cpu":  # eager calls read it
            x = x.to(self.device)
            x = x.to(torch.float32) if x.dtype is torch.float64 and not x.requires_grad else x
        place = -1
        for i, other in enumerate(self.tensors):
            if other is x:
                place = i
        if place < 0:
            place = len(self.tensors)
            self.tensors.append(x)
        if x.ndim == 1 and not is_table:  # a row
            self._sizes[(place, 0)] = _closed(x.shape[0])
        return place


def _is_known(x: float) -> bool:
    """Whether the program holds the value of a number."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(x)


def _is_small(x: int) -> bool:
    """Whether a number has few bits; the program is made for numbers of which the same is true."""
    return True if -SMALL_NUMBER <= x <= SMALL_NUMBER else False  # noqa: SIM210  (a comparison stays open)


def _closed(x: Any) -> Any:
    """The value of a number, which the program then holds. One that it holds open may be known all the same,
    as the difference of two equal sizes is."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(x)
