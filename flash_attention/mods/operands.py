"""Operands of recorded operations as nodes."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_attention.mods.recording import Recording
from flash_attention.mods.refusal import refused
from flash_attention.mods.symbols import Symbol, gathered
from flash_helpers.messages import named_type
from flash_helpers.mods.operations import Kind

BOOL, INT, FLOAT = Kind


def recording_of(*values: Any) -> Recording:
    """The recording that the symbols among some values belong to."""
    return next(x._recording for x in values if isinstance(x, Symbol))


def operand(recording: Recording, x: Any) -> tuple[int, int | None]:
    """Any operand as a node and its length."""
    if isinstance(x, Symbol):
        return x.value()
    if isinstance(x, Tensor):
        if x.ndim == 1:
            return gathered(recording, x, slice(None)).value()
        return recording.scalar_tensor(x), None
    place = recording.python_number(x)
    if place is None:
        raise refused(
            f"{named_type(x)}, {x!r:.60}, takes part in an operation",
            "Operands are values, numbers, and captured tensors with an index for each dimension",
        )
    return place, None


def joined(*lengths: int | None) -> int | None:
    """The length of a result whose operands have these."""
    rows = {n for n in lengths if n is not None}
    if len(rows - {1}) > 1:
        raise refused(
            f"rows of {' and '.join(map(str, sorted(rows)))} values take part in one operation",
            "Rows must be of one length",
        )
    return max(rows) if rows else None


def applied(op: str, *values: Any) -> Any:
    """An operation of ``flash_helpers.mods.operations``."""
    recording = recording_of(*values)
    operands = [operand(recording, x) for x in values]
    return Symbol(
        recording, recording.apply(op, *(p for p, _ in operands)), joined(*(n for _, n in operands))
    )


def kind_of(x: Any) -> Kind:
    """The kind of an operand."""
    if isinstance(x, Symbol):
        return x._recording.builder.kind(x.value()[0])
    if isinstance(x, Tensor):
        return FLOAT if x.is_floating_point() else BOOL if x.dtype is torch.bool else INT
    whole = (numbers.Integral, torch.SymInt)
    return BOOL if isinstance(x, bool | np.bool_) else INT if isinstance(x, whole) else FLOAT


def converted(x: Any, kind: Kind) -> Any:
    """A symbol in another kind."""
    place, length = x.value()
    return Symbol(x._recording, x._recording.builder.convert(place, kind), length)
