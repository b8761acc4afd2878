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
FEW_KEYS = 3  # that a query sees: there what the backward pass loses by a rounded O is not small
FEW_ROWS = 64  # queries of all heads: how far eager PyTorch is off for fewer of them is chance
BITS_OF_P = 11  # of what stands for P in dS, at least
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
    s = s.masked_fill(_hidden(q.shape[1], k.shape[2], (left, right), q.device), -math.inf)
    if sinks:
        s = torch.cat((s, sinks[0][None, :, None, None].expand(*s.shape[:3], 1)), -1)
    blind = (s == -math.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(s.masked_fill(blind, 0.0), -1).masked_fill(blind[..., 0], -math.inf)
    p = torch.softmax(s.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)[..., : k.shape[2]]
    return (p.to(q.dtype) @ v).transpose(1, 2), lse


def _hidden(
    seq_len_q: int, seq_len_k: int, limits: tuple[int | None, int | None], device: torch.device
) -> Tensor:
    """(queries, keys), true where a query does not see a key."""
    (left, right), hidden = limits, torch.zeros(seq_len_q, seq_len_k, dtype=torch.bool, device=device)
    place = torch.arange(seq_len_q, device=device)[:, None] + seq_len_k - seq_len_q
    key = torch.arange(seq_len_k, device=device)
    if left is not None:
        hidden |= key < place - left
    if right is not None:
        hidden |= key > place + right
    return hidden


def gradients_of_output(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    **options: Any,
) -> ReferenceGradients:
    """Exact gradients, but for O, which is the one that a forward pass has returned and rounded.

    It enters them as rowsum(O * dO), where a gradient of the LSE does.

    Args:
        out: what the forward pass returned; the backward pass reads it in the type of q.
        q, k, v, dout, dlse, sinks, options: as of ``reference_gradients``.
    """
    with torch.no_grad():
        exact, _ = reference(q, k, v, sinks=sinks, **options)
    lost = ((out.to(q.dtype).double() - exact) * dout.double()).sum(-1).transpose(1, 2)
    own = -lost if dlse is None else dlse.double() - lost
    return reference_gradients(q, k, v, dout, own, sinks=sinks, **options)


def most_by_rounding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    out: Tensor | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    diagonal_offset: int = 0,
) -> dict[str, Tensor]:
    """The most that each element of dQ, dK and dV may be off by the roundings of a backward pass.

    P and dS are rounded before products, P also within dS, and each gradient once in the end. All of them may
    go one way. What float32 loses is not counted.

    Args:
        out: what the forward pass returned; None: the exact output.
        q, k, v, dout, dlse, options: as of ``reference_gradients``.
    """
    options: dict[str, Any] = {"causal": causal, "window": window, "diagonal_offset": diagonal_offset}
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    given = {**options, "softmax_scale": scale, "softcap": softcap, "sinks": sinks}
    exact, lse = reference(q, k, v, **given)
    unit, group = torch.finfo(q.dtype).eps / 2, q.shape[2] // k.shape[2]
    wide_k, wide_v = (x.double().repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    rows_q, rows_do = (x.double().transpose(1, 2) for x in (q, dout))
    rows_o = (exact if out is None else out.to(q.dtype).double()).transpose(1, 2)
    s = rows_q @ wide_k.mT * scale
    slope = torch.ones_like(s)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
        slope = 1 - (s / softcap) ** 2
    hidden = _hidden(q.shape[1], k.shape[1], _limits(**options), q.device)
    blind = (lse == -math.inf)[..., None]
    P = torch.exp(s - lse[..., None].masked_fill(blind, 0.0)).masked_fill(hidden | blind, 0.0)
    delta = (rows_o * rows_do).sum(-1, keepdim=True) - (0.0 if dlse is None else dlse.double()[..., None])
    of_dS = (P * slope * (rows_do @ wide_v.mT - delta)).abs() * (unit + 2.0**-BITS_OF_P)

    def summed(x: Tensor) -> Tensor:
        """Of query heads to those of k and v."""
        return x.unflatten(1, (k.shape[2], group)).sum(2)

    found = {
        "dq": of_dS @ wide_k.abs() * abs(scale),
        "dk": summed(of_dS.mT @ rows_q.abs()) * abs(scale),
        "dv": summed(P.mT @ rows_do.abs()) * unit,
    }
    if out is None:
        out = exact
    own = gradients_of_output(out, q, k, v, dout, dlse, **given)
    return {name: x.transpose(1, 2) + unit * getattr(own, name).abs() for name, x in found.items()}


def check_gradients(
    found: Mapping[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    rounding: float = TINY,
    few_keys: bool = False,
    out: Tensor | None = None,
    **options: Any,
) -> None:
    """Holds gradients of one dense call against float64 and the error of eager PyTorch.

    Eager PyTorch's backward pass knows the output before it was rounded; one that keeps O and the LSE alone
    does not. Where a query sees ``FEW_KEYS`` at most, or may give them nearly all its weight, where there are
    fewer than ``FEW_ROWS`` queries, and for the gradient of sinks, float64 takes the O that was returned. Of
    so few queries, an error beyond eager PyTorch's may be as large as the roundings of a backward pass can
    make it (``most_by_rounding``), in every element. ``tests/unit/test_gradient_bounds.py`` simulates both.

    Args:
        found: the gradients by their names.
        q, k, v, dout, dlse, options: as of ``reference_gradients``.
        rounding: an error this small, beside the largest value, is none.
        few_keys: scores may be so large that queries give few keys nearly all their weight.
        out: what the forward pass returned; None: not known, and the exact one stands for it.

    Raises:
        AssertionError: one is too far off, or is not finite.
    """
    tensors = q, k, v, dout, dlse
    exact = reference_gradients(*tensors, **options)._asdict()
    eager = own = exact  # without rows or without keys nothing is rounded
    if q.numel() and k.numel():
        eager = eager_gradients(*tensors, **options)._asdict()
        if out is not None:
            own = gradients_of_output(out, *tensors, **options)._asdict()
    few_keys = few_keys or _most_keys(k.shape[1], *_limits(**options)) <= FEW_KEYS
    few_rows = 0 < q.shape[0] * q.shape[1] * q.shape[2] < FEW_ROWS and k.numel() > 0
    most: Mapping[str, Tensor] = most_by_rounding(*tensors, out, **options) if few_rows else {}
    ratio = MAX_RATIO_CAPPED if options.get("softcap") else MAX_RATIO
    for name, gradient in found.items():
        right = (own if few_keys or few_rows or name == "dsinks" else exact)[name]
        error, allowed = gradient.double() - right, eager[name].double() - exact[name]
        least = torch.finfo(q.dtype).eps if name == "dsinks" and out is None else 0.0
        tiny = max(least, rounding) * (1 + _largest(right))
        if name in most and bool((error.abs() <= most[name] + tiny).all()):
            continue
        beyond = ", beyond what roundings make" if few_rows else ""
        if not _largest(error) <= ratio * _largest(allowed) + tiny:
            raise AssertionError(
                f"{name} is off by {_largest(error):.3g} at most, eager PyTorch by {_largest(allowed):.3g}; "
                f"allowed is {ratio} times that{beyond}"
            )
        if not _rms(error) <= MAX_RMS_RATIO * _rms(allowed) + tiny:
            raise AssertionError(
                f"{name} is off by {_rms(error):.3g} (RMS), eager PyTorch by {_rms(allowed):.3g}; allowed is "
                f"{MAX_RMS_RATIO} times that{beyond}"
            )


def _most_keys(seq_len_k: int, left: int | None, right: int | None) -> int:
    """That one query may see."""
    return seq_len_k if left is None or right is None else min(seq_len_k, left + right + 1)


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0
