"""Which calls do not run at once: arrays of other libraries, fake and meta tensors, autocast."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flash_attention.checks.calls import DTYPES
from flash_attention.checks.tensors import has_own_dispatch
from flash_attention.dlpack import is_foreign
from flash_attention.torch_private import (
    dispatch_modes,
    functionalizes,
    is_functional,
    is_tracing,
    is_transformed,
)


def traced() -> bool:
    """Whether somebody records operators: then even what could run at once has to be one."""
    return is_dynamo_compiling() or dispatch_modes() > 0 or is_tracing()


def not_for_eager(q: object, k: object, v: object, *others: object) -> bool:
    """Whether an operator of ``torch_ops`` or an import by DLPack has to come first.

    Args:
        others: what else the call was given that may be a tensor.

    False for what is no array at all, so that the checks refuse it by name.
    """
    if is_foreign(q) or is_foreign(k) or is_foreign(v):
        return True
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return False
    if functionalizes():
        return True
    for x in (q, k, v, *others):
        if isinstance(x, Tensor) and stands_for_another(x):
            return True
    return (q.is_meta and k.is_meta and v.is_meta) or wants_autocast(q, k, v)


def stands_for_another(x: Tensor) -> bool:
    """Whether x has no memory of its own, but operators find what it stands for: fake tensors, and those of
    torch.func.functionalize, torch.func.grad and torch.vmap."""
    return has_own_dispatch(x) or is_transformed(x) or is_functional(x)


def is_readable(x: Tensor) -> bool:
    """Whether the host may read numbers of x: on the CPU, while nobody records what is done with them."""
    return not (
        torch.compiler.is_compiling()
        or x.device.type != "cpu"
        or dispatch_modes() > 0
        or is_tracing()
        or functionalizes()
        or stands_for_another(x)
    )


def is_read_later(x: Tensor) -> bool:
    """Whether numbers of x are there when a compiled program runs, on the CPU, where nobody waits for them.

    What ``is_readable`` lets the host check at once, the program checks then: by ``assert_async``, whose
    message is a constant, as tracers need it.
    """
    return torch.compiler.is_compiling() and x.device.type == "cpu"


def wants_autocast(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether autocast is on and has to convert: inputs that are of one 16-bit type stay as they are."""
    if q.dtype is k.dtype is v.dtype and q.dtype in DTYPES:
        return False
    return q.device.type in ("cuda", "cpu") and torch.is_autocast_enabled(q.device.type)
