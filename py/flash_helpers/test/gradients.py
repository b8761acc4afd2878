"""What gradients are compared with: PyTorch's own, of attention written out in the type of its inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_helpers.test.reference import reference_gradients

if TYPE_CHECKING:
    from flash_attention.backward_call import BackwardCall
    from flash_helpers.kernels.kernel import KernelConfig

NAMES = ("dq", "dk", "dv", "dsinks")
Limits = tuple[int | None, int | None]


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Limits = (None, None),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and its LSE with every product and P in the type of the inputs, the softmax in float32.

    The arguments are those of ``flash_helpers.test.reference.reference``.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
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
    if sinks is not None:
        s = torch.cat((s, sinks.float()[None, :, None, None].expand(*s.shape[:3], 1)), -1)
    blind = (s == -math.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(s.masked_fill(blind, 0.0), -1).masked_fill(blind[..., 0], -math.inf)
    p = torch.softmax(s.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)[..., : k.shape[2]]
    return (p.to(q.dtype) @ v).transpose(1, 2), lse


def gradients_of(
    results: tuple[Tensor, Tensor], inputs: list[Tensor], dout: Tensor | None, dlse: Tensor | None = None
) -> list[Tensor]:
    """Gradients of an output and its LSE; zeros where an input takes no part. LSEs of -inf have none."""
    out, lse = results
    loss = out.new_zeros((), dtype=torch.float32)
    if dout is not None:
        loss = loss + (out.float() * dout.float()).sum()
    if dlse is not None:
        seen = lse != -math.inf
        loss = loss + (lse[seen].float() * dlse[seen]).sum()
    found: Any = [None] * len(inputs)
    if loss.requires_grad:  # else no query sees a key
        found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def rms(x: Tensor) -> float:
    """The root of the mean of the squares; 0 of nothing."""
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def check_as_exact_as_eager(
    name: str, found: Tensor, eager: Tensor, expected: Tensor, softcap: float = 0.0, rounding: float = 0.0
) -> None:
    """Asserts that a gradient's largest error is at most twice that of an eager one, three times with a soft
    cap, and its RMS error at most 1.1 times, beside what one rounding of a small number leaves.

    Args:
        found: the gradient.
        eager: that of ``eager_attention``.
        expected: in float64.
        softcap: that of the call.
        rounding: what one rounding leaves, beside the largest value; 0: 2e-5.
    """
    assert found.shape == expected.shape, name
    if not expected.numel():
        return
    factor = 3 if softcap else 2
    tiny = (rounding or 2e-5) * (1 + expected.abs().max().item())
    error, allowed = found.double() - expected, eager.double() - expected
    worst, eager_worst = error.abs().max().item(), allowed.abs().max().item()
    assert worst <= factor * eager_worst + tiny, f"{name}: error {worst}, of eager attention {eager_worst}"
    mean, eager_mean = rms(error), rms(allowed)
    assert mean <= 1.1 * eager_mean + tiny, f"{name}: RMS error {mean}, of eager attention {eager_mean}"


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


def check_gradients(
    found: Mapping[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    rounding: float = 0.0,
    **options: Any,
) -> None:
    """Holds gradients of one dense call against float64 and the error of eager PyTorch.

    Args:
        found: the gradients by their names.
        q, k, v, dout, dlse, options: as of ``reference_gradients``.
        rounding: as of ``check_as_exact_as_eager``.

    Raises:
        AssertionError: one is too far off, or is not finite.
    """
    expected = reference_gradients(q, k, v, dout, dlse, **options)._asdict()
    sinks = options.pop("sinks", None)
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    if sinks is not None:
        inputs.append(sinks.detach().float().clone().requires_grad_())
    eager = expected  # without rows or without keys nothing is rounded
    if q.numel() and k.numel():
        results = eager_attention(*inputs[:3], sinks=None if sinks is None else inputs[3], **options)
        eager = dict(zip(NAMES, gradients_of(results, inputs, dout, dlse), strict=False))
    for name, gradient in found.items():
        # The gradient of a sink is a sum over the rows of O, which the forward pass has rounded.
        least = torch.finfo(q.dtype).eps if name == "dsinks" else 0.0
        softcap = options.get("softcap", 0.0)
        check_as_exact_as_eager(name, gradient, eager[name], expected[name], softcap, max(least, rounding))
