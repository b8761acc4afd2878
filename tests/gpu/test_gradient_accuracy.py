"""Gradients of inputs of several kinds are as close to float64 as FlashAttention-2's are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_attention import attention
from flash_helpers.test.reference import reference_gradients

MAX_RATIO = 1.1  # of the relative error, to FlashAttention-2's
BATCH, SEQ_LEN, HEADS = 1, 700, 4
HALF, BFLOAT = torch.float16, torch.bfloat16


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device="cuda")


def _outliers(generator: torch.Generator, *shape: int) -> Tensor:
    """A few rows are eight times as large, and a few columns four times."""
    x = _normal(generator, *shape)
    x[:, ::41] *= 8
    x[..., ::29] *= 4
    return x


def _low_rank(generator: torch.Generator, *shape: int) -> Tensor:
    return _normal(generator, *shape[:-1], 4) @ _normal(generator, 4, shape[-1]) / 2


def _correlated(generator: torch.Generator, *shape: int) -> Tensor:
    """Every row is near the same one."""
    return _normal(generator, 1, 1, 1, shape[-1]) + 0.2 * _normal(generator, *shape)


KINDS = {"normal": _normal, "outliers": _outliers, "low rank": _low_rank, "correlated": _correlated}


def _relative_errors(found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> list[float]:
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, right, strict=True)]


# At head size 64 dS of FP16 inputs is made of P in FP16, which costs more than a tenth.
@pytest.mark.parametrize(
    ("dtype", "d_head"),
    [(BFLOAT, 64), (BFLOAT, 96), (BFLOAT, 128), (BFLOAT, 192), (BFLOAT, 256), (HALF, 128), (HALF, 256)],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seq_len", [SEQ_LEN, 1500])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_as_close_as_those_of_flash_attention_2(
    kind: str, seq_len: int, causal: bool, dtype: torch.dtype, d_head: int
) -> None:
    generator = torch.Generator("cuda").manual_seed(11)
    made: Callable[..., Tensor] = KINDS[kind]
    q, k, v = (made(generator, BATCH, seq_len, HEADS, d_head).to(dtype).requires_grad_() for _ in range(3))
    dout = _normal(generator, BATCH, seq_len, HEADS, d_head).to(dtype)
    mine = torch.autograd.grad(attention(q, k, v, causal=causal), (q, k, v), dout)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
    peer = torch.autograd.grad(out, (q, k, v), dout.transpose(1, 2))
    right = reference_gradients(q.detach(), k.detach(), v.detach(), dout, causal=causal)
    errors = [_relative_errors(found, (right.dq, right.dk, right.dv)) for found in (mine, peer)]
    print(kind, seq_len, causal, dtype, d_head, [f"{a / b:.3f}" for a, b in zip(*errors, strict=True)])
    for name, own, other in zip(("dq", "dk", "dv"), *errors, strict=True):
        assert own <= MAX_RATIO * other, f"{name}: {own:.3g}, FlashAttention-2 has {other:.3g}"
