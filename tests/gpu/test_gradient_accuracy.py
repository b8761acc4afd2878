"""Gradients of inputs of several kinds are as close to float64 as FlashAttention-2's are."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_attention import attention
from flash_helpers.test.reference import reference_gradients

MAX_RATIO = 1.1  # of the relative error, to FlashAttention-2's
N_DRAWS = 8  # of rows near one row dK is off as a few sums are: in one draw 0.7 to 1.2 times as far
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


Squares = list[float]  # of dq, dk and dv


def _squares(found: tuple[Tensor, ...]) -> Squares:
    return [float(x.double().square().sum()) for x in found]


def _draw(
    made: Callable[..., Tensor], seed: int, shape: tuple[int, ...], dtype: torch.dtype, causal: bool
) -> tuple[Squares, Squares, Squares]:
    """Of one draw: of this library's errors, of FlashAttention-2's, and of the exact gradients."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (made(generator, *shape).to(dtype).requires_grad_() for _ in range(3))
    dout = _normal(generator, *shape).to(dtype)
    mine = torch.autograd.grad(attention(q, k, v, causal=causal), (q, k, v), dout)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
    peer = torch.autograd.grad(out, (q, k, v), dout.transpose(1, 2))
    right = reference_gradients(q.detach(), k.detach(), v.detach(), dout, causal=causal)
    exact = (right.dq, right.dk, right.dv)
    off = [
        _squares(tuple(x.double() - y for x, y in zip(found, exact, strict=True))) for found in (mine, peer)
    ]
    return off[0], off[1], _squares(exact)


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
    shape = (BATCH, seq_len, HEADS, d_head)
    drawn = [_draw(KINDS[kind], seed, shape, dtype, causal) for seed in range(11, 11 + N_DRAWS)]
    sums = [[sum(of_draw) for of_draw in zip(*some, strict=True)] for some in zip(*drawn, strict=True)]
    own, other = ([math.sqrt(x / y) for x, y in zip(off, sums[2], strict=True)] for off in sums[:2])
    print(kind, seq_len, causal, dtype, d_head, [f"{a / b:.3f}" for a, b in zip(own, other, strict=True)])
    for name, mine, peer in zip(("dq", "dk", "dv"), own, other, strict=True):
        assert mine <= MAX_RATIO * peer, f"{name}: {mine:.3g}, FlashAttention-2 has {peer:.3g}"
