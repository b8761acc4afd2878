"""PyTorch's registry of flash attentions: its own function runs this library on CUDA, forward and backward.

Two operators of PyTorch are replaced below autograd, which keeps its own formula: it calls the backward one
with what the forward one has returned.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flash_attention.attention import attention
from flash_attention.checks.options import refuse
from flash_attention.checks.tensors import check_tensors, shapes_of
from flash_attention.compat.words import in_words
from flash_attention.layouts import DENSE
from flash_attention.options import Options
from flash_attention.run.passes import Saved, Wanted, backward_pass

IMPLEMENTATION = "flash_attention_kernels"
"""What ``torch.nn.attention.activate_flash_attention_impl`` takes."""
FORWARD = "_scaled_dot_product_flash_attention"
BACKWARD = "_scaled_dot_product_flash_attention_backward"


def register_with_torch() -> bool:
    """Offers the library to PyTorch under the name ``flash_attention_kernels``.

    After ``torch.nn.attention.activate_flash_attention_impl`` with that name, PyTorch's own attention runs
    this library where it would run its flash attention on CUDA, forward and backward.

    Returns:
        False where this torch has no such registry (before 2.11).
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
    if register is None:
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
        self.library.impl(BACKWARD, flash_attention_backward_operator, device_type)
        self.turned_off = alone and torch.backends.cuda.cudnn_sdp_enabled()
        if self.turned_off:
            torch.backends.cuda.enable_cudnn_sdp(False)

    def remove(self) -> None:
        self.library = None
        if self.turned_off:
            torch.backends.cuda.enable_cudnn_sdp(True)
            self.turned_off = False


@in_words(q="query", k="key", v="value", causal="is_causal", softmax_scale="scale")
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
    tensors = {"query": query, "key": key, "value": value}
    check_tensors(tensors)
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"query, key and value must be (batch, n_heads, seq, d); given {shapes_of(tensors)}")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = torch.empty_like(query)  # PyTorch's shape inference expects the strides of query
    rows = out.transpose(1, 2) if out.stride(-1) == 1 else None  # a kernel writes no others
    with torch.no_grad():  # autograd is above
        made, lse = attention(q, k, v, softmax_scale=scale, causal=is_causal, return_lse=True, out=rows)
    if rows is None:
        out.copy_(made.transpose(1, 2))
    seed, offset = (query.new_empty(shape, dtype=dtype) for shape, dtype in _random_states())
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, query.new_empty(0)


def flash_attention_backward_operator(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """``aten::_scaled_dot_product_flash_attention_backward``: the gradients of query, key and value.

    Everything but ``grad_out`` is what the forward operator was given and has returned. The states of dropout
    mean nothing, for there is none.

    Raises:
        NotImplementedError: dropout_p.
    """
    refuse(dropout_p=dropout_p)
    tensors = {"grad_out": grad_out, "query": query, "key": key, "value": value, "out": out}
    check_tensors({**tensors, "logsumexp": logsumexp})
    dout, q, k, v, o = (x.transpose(1, 2) for x in tensors.values())
    options = Options(causal=is_causal, softmax_scale=scale, return_lse=True)
    saved, wanted = Saved(q, k, v, None, o, logsumexp), Wanted(True, True, True, False)
    with torch.no_grad():
        made = backward_pass(saved, DENSE, options, wanted, dout, None)
    return tuple(grad if grad is None else grad.transpose(1, 2) for grad in made[:3])


@functools.cache
def _random_states() -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Shapes and types of the states of dropout, which compiled code asserts: those of PyTorch's inference.

    Nobody reads them. They must be on the device of the others: with a meta tensor among its arguments, the
    backward operator would be inferred and not run.
    """
    x = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="meta")
    results = getattr(torch.ops.aten, FORWARD)(x, x, x)
    return tuple((state.shape, state.dtype) for state in results[6:8])
