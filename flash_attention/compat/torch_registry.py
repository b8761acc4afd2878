"""PyTorch's registry of flash attentions: its own function runs this library on CUDA, forward only.

Two operators of PyTorch are replaced. The forward one is refused above autograd where somebody wants a
gradient, since below autograd nothing shows it. The backward one is refused always: a graph compiled before
the activation calls it without asking first.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attention.attention import attention
from flash_attention.checks.options import refuse
from flash_attention.checks.tensors import check_derivatives, check_tensors
from flash_attention.torch_private import below_autograd

IMPLEMENTATION = "flash_attention_kernels"
FORWARD = "_scaled_dot_product_flash_attention"
BACKWARD = "_scaled_dot_product_flash_attention_backward"
TRAIN_WITHOUT = "call torch.nn.attention.restore_flash_attention_impl() before training"


def register_with_torch() -> bool:
    """Offers the library to PyTorch under the name ``flash_attention_kernels``.

    After ``torch.nn.attention.activate_flash_attention_impl`` with that name, PyTorch's own attention runs
    this library where it would run its flash attention on CUDA, forward only: an input that requires grad
    raises ``NotImplementedError``.

    Returns:
        False where this torch has no such registry (before 2.11), or does not show who wants a gradient.
    """
    return _register(_Activated)


def prefer_in_torch() -> bool:
    """Makes plain ``torch.nn.functional.scaled_dot_product_attention`` run this library on CUDA.

    Registers, activates, and turns cuDNN's attention off, which PyTorch asks first on Hopper and newer GPUs.
    Calls with a mask, which cuDNN would take, go to PyTorch's memory-efficient attention then.
    ``torch.nn.attention.restore_flash_attention_impl()`` undoes it.

    Returns:
        as ``register_with_torch``; where it is False, nothing was changed.
    """
    if not _register(functools.partial(_Activated, alone=True)):
        return False
    torch.nn.attention.activate_flash_attention_impl(IMPLEMENTATION)
    return register_with_torch()


def _register(activate: Any) -> bool:
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None or below_autograd is None:
        return False
    register(IMPLEMENTATION, register_fn=activate)
    return True


class _Activated:
    """PyTorch's flash attention operators of one device type, replaced until ``remove`` is called.

    Args:
        device_type: whose operators.
        alone: cuDNN's attention is off meanwhile.
    """

    def __init__(self, device_type: str = "CUDA", alone: bool = False) -> None:
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        self.library.impl(FORWARD, flash_attention_operator, device_type)
        self.library.impl(FORWARD, _without_derivatives, f"Autograd{device_type}")
        self.library.impl(BACKWARD, _refuse_backward, device_type)
        self.turned_off = alone and torch.backends.cuda.cudnn_sdp_enabled()
        if self.turned_off:
            torch.backends.cuda.enable_cudnn_sdp(False)

    def remove(self) -> None:
        self.library = None
        if self.turned_off:
            torch.backends.cuda.enable_cudnn_sdp(True)
            self.turned_off = False


def _without_derivatives(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
    """The forward operator at autograd's level: refuses, or goes on below."""
    check_derivatives({"query": query, "key": key, "value": value}, TRAIN_WITHOUT)
    assert below_autograd is not None  # else nothing was registered
    with below_autograd():
        return getattr(torch.ops.aten, FORWARD)(query, key, value, *rest, **options)


def _refuse_backward(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        f"a gradient of scaled_dot_product_attention is wanted while {IMPLEMENTATION} is active, which has "
        f"no backward pass: {TRAIN_WITHOUT}, and compile anew what was compiled"
    )


def flash_attention_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_flash_attention``: (batch, n_heads, seq, d) in, nine results out.

    ``is_causal`` is aligned bottom-right, as PyTorch means it here: ``scaled_dot_product_attention`` itself
    passes it for equal lengths only, ``torch.nn.attention.bias.causal_lower_right`` for others.

    Raises:
        NotImplementedError: dropout_p, return_debug_mask; what ``attention`` raises.
    """
    refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask)
    check_tensors({"query": query, "key": key, "value": value})
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = torch.empty_like(query)  # PyTorch's shape inference expects the strides of query
    rows = out.transpose(1, 2) if out.stride(-1) == 1 else None  # a kernel writes no others
    made, lse = attention(q, k, v, softmax_scale=scale, causal=is_causal, return_lse=True, out=rows)
    if rows is None:
        out.copy_(made.transpose(1, 2))
    seed, offset = (query.new_empty(shape, dtype=dtype) for shape, dtype in _random_states())
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, query.new_empty(0)


@functools.cache
def _random_states() -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Shapes and types of the states of dropout, which compiled code asserts: those of PyTorch's inference.

    Nobody reads them. They must be on the device of the others: with a meta tensor among its arguments, the
    backward operator would be inferred and not run.
    """
    x = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="meta")
    results = getattr(torch.ops.aten, FORWARD)(x, x, x)
    return tuple((state.shape, state.dtype) for state in results[6:8])
