"""Gradients of a call by this library and by eager PyTorch, and how far each may be from float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_helpers.test.reference import ReferenceGradients, reference_gradients

if TYPE_CHECKING:
    from flash_attention.backward_call import BackwardCall
    from flash_helpers.kernels.kernel import KernelConfig

NAMES = ("dq", "dk", "dv", "dsinks")
MAX_RATIO = 2.0  # of the largest error, to that of eager PyTorch in the same type
MAX_RATIO_CAPPED = 3.0  # with a soft cap
MAX_RMS_RATIO = 1.1
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
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    hidden = _hidden(q, k, causal, window, diagonal_offset)
    out, lse = _eager(inputs, scale, hidden, softcap)
    loss = (out.float() * dout.float()).sum()
    if dlse is not None:
        seen = lse != -math.inf
        loss = loss + (lse[seen] * dlse[seen]).sum()
    found: Any = [None] * len(inputs)
    if loss.requires_grad:  # else no query sees a key
        found = torch.autograd.grad(loss, inputs, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]
    return ReferenceGradients(grads[0], grads[1], grads[2], grads[3] if sinks is not None else None)


def gradients_of_rounded_output(
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
    """The steps of a fused backward pass in float64, from an output in the input type.

    Such a pass knows ``D = rowsum(dO * O) - dLSE`` from the output that the forward pass has rounded. Where
    nearly all the weight of a query lies on one key, ``dP - D`` cancels, and that rounding is what is left.
    Arguments as of ``reference_gradients``.
    """
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    hidden = _hidden(q, k, causal, window, diagonal_offset)
    logits = sinks if sinks is None else sinks.double()
    inputs = [x.double() for x in (q, k, v)] + ([] if logits is None else [logits])
    out, lse = _eager(inputs, scale, hidden, softcap)
    group = q.shape[2] // k.shape[2]
    keys, values = (x.double().repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    queries, grads = (x.double().transpose(1, 2) for x in (q, dout))
    slope: Tensor | float = 1.0
    s = queries @ keys.mT * scale
    if softcap:
        t = torch.tanh(s / softcap)
        s, slope = softcap * t, 1 - t * t
    seen = (lse != -math.inf)[..., None] & ~hidden
    p = (s - lse[..., None]).exp().where(seen, 0.0)
    d = (dout.double() * out.to(q.dtype).double()).sum(-1).transpose(1, 2)
    d = d if dlse is None else d - dlse.double()
    ds = (p * (grads @ values.mT - d[..., None]) * slope * scale).where(seen, 0.0)

    def of_shared(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, group)).sum(2).transpose(1, 2)

    dq, dk, dv = (ds @ keys).transpose(1, 2), of_shared(ds.mT @ queries), of_shared(p.mT @ grads)
    dsinks = None
    if logits is not None:
        share = (logits[None, :, None] - lse).exp().where(lse != -math.inf, 0.0)
        dsinks = -(share * d).where(lse != -math.inf, 0.0).sum((0, 2))
    return ReferenceGradients(dq, dk, dv, dsinks)


def _hidden(
    q: Tensor, k: Tensor, causal: bool, window: tuple[int | None, int | None], diagonal_offset: int
) -> Tensor:
    """(queries, keys): which keys a query does not see."""
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    left = None if left is None else left - diagonal_offset
    right = None if right is None else right + diagonal_offset
    place = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1], device=q.device)
    hidden = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    if left is not None:
        hidden |= key < place - left
    if right is not None:
        hidden |= key > place + right
    return hidden


def _eager(inputs: list[Tensor], scale: float, hidden: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """Attention in the type of its inputs, softmax in float32 at least."""
    q, k, v, *sinks = inputs
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    s = q.transpose(1, 2) @ k.mT
    s = (s if s.dtype is torch.float64 else s.float()) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(hidden, -math.inf)
    if sinks:
        s = torch.cat((s, sinks[0][None, :, None, None].expand(*s.shape[:3], 1)), -1)
    blind = (s == -math.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(s.masked_fill(blind, 0.0), -1).masked_fill(blind[..., 0], -math.inf)
    p = torch.softmax(s.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)[..., : k.shape[2]]
    return (p.to(q.dtype) @ v).transpose(1, 2), lse


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

    Args:
        found: the gradients by their names.
        q, k, v, dout, dlse, options: as of ``reference_gradients``.
        rounding: an error this small, beside the largest value, is none.
        few_keys: queries may see few keys, or give them all their weight: then an error may also be as much
            larger than that of exact steps from a rounded output (``gradients_of_rounded_output``).

    Raises:
        AssertionError: one is too far off, or is not finite.
    """
    right = reference_gradients(q, k, v, dout, dlse, **options)._asdict()
    eager = right  # without rows or without keys nothing is rounded
    if q.numel() and k.numel():
        eager = eager_gradients(q, k, v, dout, dlse, **options)._asdict()
    exact = eager
    if few_keys and q.numel() and k.numel():
        exact = gradients_of_rounded_output(q, k, v, dout, dlse, **options)._asdict()
    ratio = MAX_RATIO_CAPPED if options.get("softcap") else MAX_RATIO
    for name, gradient in found.items():
        error, *allowed = (x.double() - right[name] for x in (gradient, eager[name], exact[name]))
        largest, rms = (max(map(size, allowed)) for size in (_largest, _rms))
        # The gradient of a sink is a sum over the rows of O, which the forward pass has rounded.
        least = torch.finfo(q.dtype).eps if name == "dsinks" else 0.0
        tiny = max(least, rounding) * (1 + _largest(right[name]))
        than = "eager PyTorch or exact steps from a rounded output" if few_keys else "eager PyTorch"
        if not _largest(error) <= ratio * largest + tiny:
            raise AssertionError(
                f"{name} is off by {_largest(error):.3g} at most, {than} by {largest:.3g}; "
                f"allowed is {ratio} times that"
            )
        if not _rms(error) <= MAX_RMS_RATIO * rms + tiny:
            raise AssertionError(
                f"{name} is off by {_rms(error):.3g} (RMS), {than} by {rms:.3g}; allowed is "
                f"{MAX_RMS_RATIO} times that"
            )


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0
