"""The element types a kernel can be compiled for."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class DType(IntEnum):
    """Element type of Q, K, V and O, numbered as ``torch.ScalarType`` numbers it."""

    FP16 = 5
    BF16 = 15

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 2

    def to_cpp_str(self) -> str:
        """The enumerator as C++ source text, e.g. ``DType::FP16``."""
        return f"DType::{self.name}"

    def to_torch_dtype(self) -> torch.dtype:
        """The ``torch.dtype`` of the same name (imports torch)."""
        import torch

        return {DType.FP16: torch.float16, DType.BF16: torch.bfloat16}[self]

    @classmethod
    def from_string(cls, text: str | int) -> DType:
        """Reads a name in any case (``fp16``, ``float16``, ``torch.bfloat16`` …) or a number.

        Raises:
            ValueError: the text names no supported type; the message lists the valid ones.
        """
        key = str(text).strip().lower().removeprefix("torch.")
        for dtype, names in _NAMES.items():
            if key in names or key == str(int(dtype)):
                return dtype
        valid = ", ".join(f"{d.name} ({', '.join(_NAMES[d])}, {int(d)})" for d in cls)
        raise ValueError(f"unknown dtype {text!r}; valid: {valid}")


_NAMES = {
    DType.FP16: ("fp16", "float16", "half"),
    DType.BF16: ("bf16", "bfloat16"),
}
