"""Gradients of a call by this library and by eager PyTorch, and how far each may be from float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_helpers.test.reference import ReferenceGradients, reference, reference_gradients

if TYPE_CHECKING:
    from flash_attention.backward_call import BackwardCall
    from flash_helpers.kernels.kernel import KernelConfig

NAMES = ("dq", "dk", "dv", "dsinks")
MAX_RATIO = 2.0  # of the largest error, to that of eager PyTorch in the same type
MAX_RATIO_CAPPED = 3.0  # with a soft cap
MAX_RMS_RATIO = 1.1
FEW_KEYS = 8  # that a query sees: there what the backward pass loses by a rounded O is not small
FEW_ROWS = 64  # queries of all heads: an RMS over fewer of them is chance
TINY = 2e-5  # errors this small, beside the largest value, are none


def run_gradients(call: BackwardCall, config: KernelConfig | None = None) -> dict[str, Tensor]:
    """Computes the gradients of a call where its tensors are; those that it wants, by their names.

    Args:
        call: the call.
        config: the configuration that is insisted on; None: choose.
    """
    from flash_attention.devices import backend, backward_backend
    from flash_attention.run.choices import choose

    choice = choose(call.problem, call.q.device, config)
    backend(backward_backend(call.q.device.type)).run_backward(call, choice)
    return {name: x for name in NAMES if (x := getattr(call, name)) is not None}


def eager_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    diagonal_offset: int = 0,
) -> ReferenceGradients:
    """PyTorch's gradients, every product and P in the input type; arguments as ``reference_gradients``."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    if sinks is not None:
        inputs.append(sinks.detach().float().clone().requires_grad_())
    left, right = _limits(causal, window, diagonal_offset)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = _eager(inputs, scale, left, right, softcap)
    loss = (out.float() * dout.float()).sum()
    if dlse is not None:
        seen = lse != -math.inf
        loss = loss + (lse[seen] * dlse[seen]).sum()
    found: Any = [None] * len(inputs)
    if loss.requires_grad:  # else no query sees a key
        found = torch.autograd.grad(loss, inputs, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]
    return ReferenceGradients(grads[0], grads[1], grads[2], grads[3] if sinks is not None else None)


def _limits(
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    diagonal_offset: int = 0,
    **_others: Any,
) -> tuple[int | None, int | None]:
    """Keys that a query sees to the left and to the right of its own place; None: all."""
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    left = None if left is None else left - diagonal_offset
    return left, None if right is None else right + diagonal_offset


def _eager(
    inputs: list[Tensor], scale: float, left: int | None, right: int | None, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attention in the type of its inputs, softmax in float32."""
    q, k, v, *sinks = inputs
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    s = (q.transpose(1, 2) @ k.mT).float() * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    place = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[2] - q.shape[1]
    key = torch.arange(k.shape[2], device=q.device)
    hidden = torch.zeros(q.shape[1], k.shape[2], dtype=torch.bool, device=q.device)
    if left is not None:
        hidden |= key < place - left
    if right is not None:
        hidden |= key > place + right
    s = s.masked_fill(hidden, -math.inf)
    if sinks:
        s = torch.cat((s, sinks[0][None, :, None, None].expand(*s.shape[:3], 1)), -1)
    blind = (s == -math.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(s.masked_fill(blind, 0.0), -1).masked_fill(blind[..., 0], -math.inf)
    p = torch.softmax(s.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)[..., : k.shape[2]]
    return (p.to(q.dtype) @ v).transpose(1, 2), lse


def of_rounded_output(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, sinks: Tensor | None = None, **options: Any
) -> ReferenceGradients:
    """What gradients lose, in exact arithmetic, because the backward pass reads an O that was rounded.

    It enters them as rowsum(O * dO), where a gradient of the LSE does.

    Args:
        q, k, v, dout, sinks, options: as of ``reference_gradients``.
    """
    with torch.no_grad():
        exact, _ = reference(q, k, v, sinks=sinks, **options)
    lost = ((exact.to(q.dtype).double() - exact) * dout.double()).sum(-1).transpose(1, 2)
    return reference_gradients(q, k, v, torch.zeros_like(dout), -lost, sinks=sinks, **options)


def check_gradients(
    found: Mapping[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    rounding: float = TINY,
    few_keys: bool = False,
    **options: Any,
) -> None:
    """Holds gradients of one dense call against float64 and the error of eager PyTorch.

    Eager PyTorch's backward pass knows the output before it was rounded. Where a query sees ``FEW_KEYS`` at
    most, or may give them nearly all its weight, what that makes is added to its error, as errors without
    relation are. The RMS of fewer than
    ``FEW_ROWS`` queries may be larger by a factor, which is 2 for one query of four heads. Both follow from
    a simulation (``tests/unit/test_gradient_bounds.py``).

    Args:
        found: the gradients by their names.
        q, k, v, dout, dlse, options: as of ``reference_gradients``.
        rounding: an error this small, beside the largest value, is none.
        few_keys: scores may be so large that queries give few keys nearly all their weight.

    Raises:
        AssertionError: one is too far off, or is not finite.
    """
    right = reference_gradients(q, k, v, dout, dlse, **options)._asdict()
    eager = right  # without rows or without keys nothing is rounded
    lost: Mapping[str, Tensor] = {}
    if q.numel() and k.numel():
        eager = eager_gradients(q, k, v, dout, dlse, **options)._asdict()
        if few_keys or _most_keys(k.shape[1], *_limits(**options)) <= FEW_KEYS:
            lost = of_rounded_output(q, k, v, dout, **options)._asdict()
    least_error = "eager PyTorch and the rounding of the output" if lost else "eager PyTorch"
    ratio = MAX_RATIO_CAPPED if options.get("softcap") else MAX_RATIO
    rms_ratio = max_rms_ratio(q.shape[0] * q.shape[1] * q.shape[2])
    for name, gradient in found.items():
        error, allowed = (x.double() - right[name] for x in (gradient, eager[name]))
        # The gradient of a sink is a sum over the rows of O, which the forward pass has rounded.
        least = torch.finfo(q.dtype).eps if name == "dsinks" else 0.0
        tiny = max(least, rounding) * (1 + _largest(right[name]))
        by_output = lost.get(name, torch.zeros(()))
        largest = math.hypot(_largest(allowed), _largest(by_output))
        if not _largest(error) <= ratio * largest + tiny:
            raise AssertionError(
                f"{name} is off by {_largest(error):.3g} at most, {least_error} by {largest:.3g}; allowed is "
                f"{ratio} times that"
            )
        rms = math.hypot(_rms(allowed), _rms(by_output))
        if not _rms(error) <= rms_ratio * rms + tiny:
            raise AssertionError(
                f"{name} is off by {_rms(error):.3g} (RMS), {least_error} by {rms:.3g}; allowed is "
                f"{rms_ratio:.3g} times that"
            )


def max_rms_ratio(rows: int) -> float:
    """Of the RMS error to that of eager PyTorch, for so many queries of all heads."""
    return MAX_RMS_RATIO * (1 + 4 / rows) if 0 < rows < FEW_ROWS else MAX_RMS_RATIO


def _most_keys(seq_len_k: int, left: int | None, right: int | None) -> int:
    """That one query may see."""
    return seq_len_k if left is None or right is None else min(seq_len_k, left + right + 1)


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0
