"""Tensors of the caller's that a result is copied into, whatever their strides are."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attention.checks.tensors import OTHER_OUTPUT, OUTPUT_ALONE, check_output_apart, check_output_places
from flash_attention.run.tracing import stands_for_another


def check_written(
    name: str, x: Tensor, inputs: dict[str, Tensor], alone: str = OUTPUT_ALONE, apart: str = OTHER_OUTPUT
) -> None:
    """No element in another's place, and no input in its memory, where anybody knows addresses.

    Args:
        alone, apart: what to do about it, for the message; ``{name}`` is the tensor's.
    """
    if torch.compiler.is_compiling() or x.is_meta or stands_for_another(x):
        return
    check_output_places(name, x, alone)
    check_output_apart(name, x, inputs, apart)
