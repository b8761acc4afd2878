"""What is recorded while a user's function runs: nodes, and the numbers and tensors that it captures."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_attention.mods.captured import CapturedFloat, CapturedInt
from flash_attention.mods.refusal import refused
from flash_attention.torch_private import is_transformed
from flash_helpers.mods.builder import Builder, TooLargeError
from flash_helpers.mods.mod import MAX_DIMENSIONS, MAX_NODES, Element, Number, TensorType
from flash_helpers.mods.operations import Kind

ELEMENTS = {
    torch.bool: Element.BOOL, torch.uint8: Element.UINT8, torch.int8: Element.INT8, torch.int16:
    Element.INT16,
    torch.int32: Element.INT32, torch.int64: Element.INT64, torch.float16: Element.FP16,
    torch.bfloat16: Element.BF16, torch.float32: Element.FP32,
}  # fmt: skip
MAX_SIZE = 2**31 - 1
TOO_LARGE = (
    f"the function has more than {MAX_NODES} operations, which is the most that a mod has",
    "Compute what is the same for all scores outside of the function, and capture it as a tensor",
)
UNDER_NO_GRAD = (
    "a value that has a gradient takes part in an operation under torch.no_grad",
    "A function is differentiated as a whole: take no_grad away, and capture tensor.detach() of a tensor "
    "that is to get no gradient",
)


def is_on(device: torch.device, wanted: torch.device) -> bool:
    """Whether a device is the wanted one, or any of its type where that has no number."""
    return device == wanted or (wanted.index is None and device.type == wanted.type)


class Recording:
    """Nodes and captured values of one or several functions."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.builder = Builder(most=MAX_NODES)
        self.numbers: list[int | float] = []
        self.tensors: list[Tensor] = []
        self.reads_values = False  # that of a tensor became a number
        self._is_differentiated = torch.is_grad_enabled()
        self._kept: list[Tensor] = []
        self._number_slots: dict[Any, int] = {}
        self._tensor_slots: dict[Any, int] = {}

    # ------------------------------------------------------------------ operations
    def apply(self, op: str, *args: int) -> int:
        """An operation of the builder; what it refuses is refused with the user's line."""
        self._check_gradient(args)
        try:
            return self.builder.apply(op, *args)
        except TooLargeError:
            raise self._too_large() from None
        except ValueError as error:
            raise refused(str(error), "Convert one of them, e.g. with .float() or .long()") from None

    def where(self, condition: int, a: int, b: int) -> int:
        self._check_gradient((a, b))
        try:
            return self.builder.where(condition, a, b)
        except TooLargeError:
            raise self._too_large() from None

    def load(self, slot: int, indices: list[int]) -> int:
        for index in indices:
            if self.builder.kind(index) is not Kind.INT:
                raise refused(
                    "an index of a captured tensor is no whole number",
                    "Index with whole numbers made of b, h, q_idx and kv_idx; .long() converts",
                )
        try:
            return self.builder.load(slot, indices)
        except TooLargeError:
            raise self._too_large() from None

    def reduce(self, op: str, length: int, body: int) -> int:
        self._check_gradient((body,))
        try:
            return self.builder.reduce(op, length, body)
        except TooLargeError:
            raise self._too_large() from None

    def _check_gradient(self, args: tuple[int, ...]) -> None:
        """Refuses what PyTorch would take for a constant where a function is differentiated."""
        if not self._is_differentiated or torch.is_grad_enabled():
            return
        nodes, waiting, seen = self.builder.nodes, list(args), set(args)
        while waiting:
            node = nodes[waiting.pop()]
            learnt = node.op == "load" and self.tensors[node.data].requires_grad
            if node.op == "score" or learnt:
                raise refused(*UNDER_NO_GRAD)
            if node.kind is Kind.FLOAT:
                waiting += [arg for arg in node.args if arg not in seen]
                seen.update(node.args)

    def _too_large(self) -> Exception:
        return refused(*TOO_LARGE)

    # ------------------------------------------------------------------ values
    def constant(self, value: Any) -> int:
        try:
            return self.builder.constant(value)
        except TooLargeError:
            raise self._too_large() from None
        except ValueError as error:
            raise refused(str(error), "Use smaller numbers") from None

    def number(self, value: int | float | torch.SymInt, origin: Any) -> int:
        """A captured number as a node."""
        key = (origin, type(value), repr(value))  # a tensor may hold another one by now; 0.0 is no -0.0
        slot = self._number_slots.get(key)
        if slot is None:
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise refused(f"{value} has more than 64 bits", "The whole numbers of a mod have 64")
            plain: Any = value  # one that a program holds open stays so
            if not isinstance(value, torch.SymInt):
                plain = float(value) if isinstance(value, float) else int(value)
            slot = self._number_slots[key] = len(self.numbers)
            self.numbers.append(plain)
            self.builder.numbers.append(Number.of(plain))
        return self.builder.number(slot)

    def python_number(self, x: Any) -> int | None:
        """A number of Python's or NumPy's as a node; None: it is none."""
        if isinstance(x, np.ndarray) and not x.ndim:  # as NumPy hands its numbers to others
            x = x[()]
        if isinstance(x, torch.SymInt):
            return self.number(x, "a size")
        if isinstance(x, bool | np.bool_):
            return self.constant(bool(x))
        if isinstance(x, CapturedInt | CapturedFloat):
            return self.number(x, x.origin)
        if isinstance(x, numbers.Integral):
            return self.constant(int(x))
        if isinstance(x, numbers.Real):
            return self.constant(float(x))
        return None

    # ------------------------------------------------------------------ tensors
    def scalar_tensor(self, x: Tensor) -> int:
        """A tensor of 0 dimensions as a node: on the CPU a number, elsewhere or where it is learnt a load."""
        if x.ndim:
            raise refused(
                f"a whole tensor of shape {tuple(x.shape)} takes part in an operation",
                "A mod computes one score: index the tensor, e.g. with [q_idx] or [h, q_idx - kv_idx]",
            )
        if x.device.type == "cpu" and not x.requires_grad and not x.is_complex():
            value = x.item()
            self.reads_values = True
            return (
                self.constant(value)
                if isinstance(value, bool)
                else self.number(value, ("tensor", self._key(x)))
            )
        return self.load(self.slot(x), [])

    def slot(self, x: Tensor) -> int:
        """The place of a tensor among those captured."""
        key = self._key(x)
        found = self._tensor_slots.get(key)
        if found is None:
            self._check(x)
            found = self._tensor_slots[key] = len(self.tensors)
            self.tensors.append(x)
            self.builder.tensors.append(TensorType(ELEMENTS[x.dtype], x.ndim))
        return found

    def _key(self, x: Tensor) -> Any:
        """Equal for views of one memory that nobody wants a gradient of."""
        self._kept.append(x)  # so that no other tensor gets its id or its memory
        has_memory = type(x) is Tensor and x.layout is torch.strided and not is_transformed(x)
        if x.requires_grad or not has_memory or not x.numel():
            return id(x)
        return (x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x.device)

    def _check(self, x: Tensor) -> None:
        what = f"a captured tensor of shape {tuple(x.shape)}"
        if x.layout is not torch.strided or x.is_nested:
            raise refused(f"{what} is not dense", "Capture dense tensors (torch.strided)")
        if x.dtype not in ELEMENTS:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in ELEMENTS)
            raise refused(
                f"{what} has the type {x.dtype}",
                f"Captured tensors have one of: {allowed}. Convert it before the call",
            )
        if x.ndim > MAX_DIMENSIONS:
            raise refused(
                f"{what} has {x.ndim} dimensions",
                f"Captured tensors have at most {MAX_DIMENSIONS}: flatten some",
            )
        if any(size > MAX_SIZE for size in x.shape):
            raise refused(
                f"{what} is too long", f"A dimension of a captured tensor has at most {MAX_SIZE} entries"
            )
        if self.device is not None and not is_on(x.device, self.device):
            raise refused(
                f"{what} is on {x.device}, and the queries are on {self.device}",
                f"Move it there before the call: .to({str(self.device)!r})",
            )
        if x.is_neg() or x.is_conj():
            raise refused(f"{what} is negated lazily (is_neg)", "Capture .resolve_neg() of it")
