"""Symbolic derivatives against PyTorch's, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_functions import function, grid, tables
from torch.nn import functional

from flash_attention.mods.evaluate import evaluate
from flash_attention.mods.tracing import Traced, trace
from flash_helpers.mods.derivative import derivative


def slope(made, score, indices, recorded=None):
    """The derivative by the score, by the mod and by PyTorch; ``recorded``: the same function for the mod."""
    traced = trace(recorded or made)
    given = score.clone().requires_grad_()
    total = torch.broadcast_to(made(given, *indices), score.shape)
    (expected,) = torch.autograd.grad(total.sum(), given)
    found = Traced(derivative(traced.mod).mod, traced.numbers, traced.tensors)
    value = evaluate(found, "d_score", score, *indices, dtype=torch.float64)
    return torch.broadcast_to(value, score.shape), expected


@pytest.fixture
def _real_is_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_real_is_float64")
def test_random_functions() -> None:
    captured = tables(torch.Generator().manual_seed(0))
    wide = {n: t.double() if t.is_floating_point() else t for n, t in captured.items()}
    uneven = 0
    for seed in range(300):
        made = function(seed, "score", wide, smooth=True)
        recorded = function(seed, "score", captured, smooth=True).function
        score, *indices = grid(torch.Generator().manual_seed(seed))
        found, expected = slope(made.function, score, indices, recorded)
        torch.testing.assert_close(
            found, expected, rtol=1e-7, atol=1e-7, equal_nan=True, msg=lambda m, t=made.text: f"{t}\n{m}"
        )
        uneven += bool((expected != 1).any())
    assert uneven > 200


ONE_EACH = {
    "pow": lambda s, b, h, q, k: (s.abs() + 0.1) ** (s * 0.3 + 1) + (s.abs() + 1) ** -1.5,
    "log2 and log1p": lambda s, b, h, q, k: torch.log2(s.abs() + 1) + torch.log1p(s.abs()),
    "expm1": lambda s, b, h, q, k: torch.expm1(s),
    "remainder": lambda s, b, h, q, k: s % 0.7 + (s + 9) % (s.abs() + 1.3),
    "floor": lambda s, b, h, q, k: torch.floor(s) + torch.round(s) * s + torch.ceil(s),
    "clamp": lambda s, b, h, q, k: torch.clamp(s, -0.5, 0.5) * s,
    "equal maxima": lambda s, b, h, q, k: torch.maximum(s, s * 1.0) + torch.minimum(s * 2, s + s),
    "abs": lambda s, b, h, q, k: s.abs() + (s * 0).abs(),
    "activations": lambda s, b, h, q, k: torch.nn.functional.gelu(s, approximate="tanh")
    + torch.nn.functional.softplus(s) + torch.nn.functional.leaky_relu(s) + torch.nn.functional.elu(s)
    + torch.nn.functional.logsigmoid(s),
    "where": lambda s, b, h, q, k: torch.where(q > k, s * 3, torch.where(s > 0, s * s, 1.0)),
    "comparisons": lambda s, b, h, q, k: (s > 0) * s + (s > 1) * 2.0,
    "a constant": lambda s, b, h, q, k: s * 0.0 + 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_EACH)
def test_one_rule_at_a_time(name: str) -> None:
    score, *indices = grid(torch.Generator().manual_seed(3))
    score[0, 0, 0, :3] = torch.tensor([0.0, 1.0, -1.0])
    found, expected = slope(ONE_EACH[name], score, indices)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def gathers(traced: Traced, slot: int, score, indices) -> torch.Tensor:
    """The gradient of a captured tensor for a loss that is the sum of all scores."""
    found = derivative(traced.mod, (slot,))
    mod = Traced(found.mod, traced.numbers, traced.tensors)
    total = torch.zeros(traced.tensors[slot].shape, dtype=torch.float64)
    for part in found.tensors:
        assert part.slot == slot
        for step in range(part.length or 1):
            at = dict(dtype=torch.float64, step=step)
            value = evaluate(mod, part.value, score, *indices, **at)
            places = [evaluate(mod, name, score, *indices, **at) for name in part.indices]
            value, *places = torch.broadcast_tensors(value, *places)
            value = torch.broadcast_to(value, score.shape)
            places = tuple(torch.broadcast_to(p, score.shape) for p in places)
            total.index_put_(places, value, accumulate=True)
    return total


TABLE = torch.randn(3, 11, generator=torch.Generator().manual_seed(5))
LEARNT = {
    "bias": lambda s, b, h, q, k, t: s + t[h, k],
    "scaled": lambda s, b, h, q, k, t: s * torch.sigmoid(t[h, q]) + t[h, k] * t[h, q],
    "buckets": lambda s, b, h, q, k, t: s + t[h, torch.clamp(q - k, -5, 5) + 5],
    "a row": lambda s, b, h, q, k, t: s + (t[h] * t[h] * q).sum(-1),
    "a product of rows": lambda s, b, h, q, k, t: s + torch.dot(t[h], t[2 - h]) * s,
    "the largest of a row": lambda s, b, h, q, k, t: s + (t[h] * (k - 4)).amax(-1),
}


@pytest.mark.parametrize("name", LEARNT)
def test_gradients_of_captured_tensors(name: str) -> None:
    score, *indices = grid(torch.Generator().manual_seed(3))
    rule = LEARNT[name]
    traced = trace(lambda s, b, h, q, k: rule(s, b, h, q, k, TABLE))
    assert [t is TABLE for t in traced.tensors] == [True]
    table = TABLE.double().requires_grad_()
    total = 0.0
    for at in torch.cartesian_prod(*(torch.arange(n) for n in score.shape)).tolist():
        total = total + rule(score[tuple(at)], *(torch.tensor(i) for i in at), table)
    (expected,) = torch.autograd.grad(total, table)
    torch.testing.assert_close(gathers(traced, 0, score, indices), expected, rtol=1e-9, atol=1e-9)


def test_a_mask_has_no_derivative() -> None:
    with pytest.raises(ValueError, match="nothing to differentiate"):
        derivative(trace(None, lambda b, h, q, k: q >= k).mod)


CAP = 0.5
OF_TORCH_NN = {
    name: lambda s, b, h, q, k, name=name: getattr(functional, name)(s)
    for name in (
        *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "silu", "mish", "softplus", "softsign"),
        *("hardtanh", "hardsigmoid", "hardswish", "hardshrink", "softshrink", "tanhshrink", "logsigmoid"),
    )
}
AT_EDGES = {
    **OF_TORCH_NN,
    "clamp": lambda s, b, h, q, k: torch.clamp(s, -0.5, 0.5) + s.clamp(min=0.0) + s.clamp_max(1.0),
    "clamp by values": lambda s, b, h, q, k: torch.clamp(s * 2.0, s, s * 0.0 + CAP),
    "clamp between nothing": lambda s, b, h, q, k: torch.clamp(s, 1.0, -1.0),
    "threshold": lambda s, b, h, q, k: functional.threshold(s, CAP, 2.0),
    "softplus with a threshold": lambda s, b, h, q, k: functional.softplus(s, 2.0, 3.0),
    "sign": lambda s, b, h, q, k: torch.sign(s) + s,
    "fmod": lambda s, b, h, q, k: torch.fmod(s, 0.7),
    "logaddexp": lambda s, b, h, q, k: torch.logaddexp(s, s * 0.0 + CAP) + torch.logaddexp(s, s * 1.0),
    "sinh": lambda s, b, h, q, k: torch.sinh(s * 0.25),
    "xlogy": lambda s, b, h, q, k: torch.xlogy(s, 2.5),
    "power": lambda s, b, h, q, k: 0.0 ** s.abs() + torch.abs(s) ** 1.5,
    "round": lambda s, b, h, q, k: torch.round(s, decimals=1) * s,
}


@pytest.mark.parametrize("name", AT_EDGES)
def test_where_a_function_has_a_corner_or_is_large(name: str) -> None:
    """In float32, as kernels compute: no branch that is not taken makes a derivative NaN."""
    made: Any = AT_EDGES[name]
    far = (80.0, -80.0) if name == "sinh" else (100.0, -100.0, 1000.0, -1000.0)
    score = torch.tensor([0.0, -0.0, 0.25, 0.5, -0.5, 1.0, -1.0, 1.5, 3.0, -3.0, 6.0, 20.0, -20.0, *far])
    given, nowhere = score.clone().requires_grad_(), torch.tensor(0)
    value = made(given, nowhere, nowhere, nowhere, nowhere)
    (expected,) = torch.autograd.grad(value.sum(), given)
    traced = trace(made)
    indices = [nowhere] * 4
    torch.testing.assert_close(evaluate(traced, "score", score, *indices), value.detach())
    found = Traced(derivative(traced.mod).mod, traced.numbers, traced.tensors)
    slopes = evaluate(found, "d_score", score, *indices).expand(score.shape)
    torch.testing.assert_close(slopes, expected, rtol=1e-5, atol=1e-6)
