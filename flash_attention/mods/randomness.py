"""The random number of a place, as a function that mods may call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flash_attention.errors import ModError
from flash_attention.mods.operands import applied
from flash_attention.mods.philox import random_reals
from flash_attention.mods.symbols import Symbol


def random(seed: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A random number in [0, 1) that depends on these five whole numbers alone.

    Within ``score_mod`` and ``mask_mod`` it is an operation like others: each call of attention computes the
    same numbers, whatever tiles it takes, on a CPU as on a GPU, forward as backward. With tensors it computes
    them at once. It has no derivative. The bits are those of Philox 4x32-10.

    Args:
        seed: 64 bits; a captured number, or a tensor () int64, which a GPU reads when the call runs.
        b, h, q_idx, kv_idx: 32 bits each; other numbers may stand in their place.
    """
    given = (seed, b, h, q_idx, kv_idx)
    if any(isinstance(x, Symbol) for x in given):
        return applied("random", *given)
    if is_dynamo_compiling() and any(isinstance(x, Tensor) and x.is_meta for x in given):
        return OPERATOR(*given)
    tensor: Any = next((x for x in given if isinstance(x, Tensor)), None)
    device = None if tensor is None else tensor.device
    numbers = [x if isinstance(x, Tensor) else torch.tensor(x, device=device) for x in given]
    if any(x.is_floating_point() for x in numbers):
        raise ModError("random takes whole numbers, and was given a real one: convert it, e.g. with .long()")
    return random_reals(torch.float32, *numbers)


# A name that a mode sees in a program that is being compiled (``in_graphs``).
_LIBRARY = torch.library.Library("flash_attention", "FRAGMENT")
_LIBRARY.define("random(Tensor seed, Tensor b, Tensor h, Tensor q_idx, Tensor kv_idx) -> Tensor")
_LIBRARY.impl("random", lambda *given: random_reals(torch.float32, *given), "CompositeImplicitAutograd")
OPERATOR = torch.ops.flash_attention.random
