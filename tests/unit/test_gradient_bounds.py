"""What the bounds on errors of gradients rest on: roundings of a backward pass, simulated in float64.

The backward pass of this library, as any that keeps O and the LSE alone, reads an O of 16 bits. For many keys
that is nothing beside its other roundings. For few keys it is more than all that eager PyTorch loses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention import attention
from flash_helpers.test.gradients import (
    FEW_KEYS,
    FEW_ROWS,
    MAX_RMS_RATIO,
    check_gradients,
    eager_gradients,
    gradients_of_output,
    most_by_rounding,
)
from flash_helpers.test.reference import reference_gradients

HALF, BFLOAT = torch.float16, torch.bfloat16
HEADS, D = 2, 64


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def tensors(dtype: torch.dtype, queries: int, keys: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout of a batch of two."""
    generator = torch.Generator().manual_seed(seed)

    def randn(rows: int) -> Tensor:
        return torch.randn(2, rows, HEADS, D, generator=generator).to(dtype)

    return randn(queries), randn(keys), randn(keys), randn(queries)


def simulated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    bits_of_P: int | None,
    rounds_dS: bool = True,
    kept: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Gradients from a rounded O, exact but for what is rounded: P to so many bits in dS; P in dV, and dS.

    ``kept`` is the type of O, and of P before it; None: that of the inputs.
    """
    dtype = q.dtype
    kept = kept or dtype
    q, k, v, dout = (x.double().transpose(1, 2) for x in (q, k, v, dout))
    scores = q @ k.mT * D**-0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    P = weights / total
    out = (weights.to(kept).double() @ v / total).to(kept).double()
    delta = (out * dout).sum(-1, keepdim=True)
    of_dS = P
    if bits_of_P is not None:
        step = torch.exp2(torch.floor(torch.log2(P)) + 1 - bits_of_P)
        of_dS = torch.round(P / step) * step
    dS = of_dS * (dout @ v.mT - delta)
    dS = dS.to(dtype).double() if rounds_dS else dS
    found = dict(dq=dS @ k * D**-0.5, dk=dS.mT @ q * D**-0.5, dv=P.to(dtype).double().mT @ dout)
    return {name: x.transpose(1, 2).to(dtype) for name, x in found.items()}


def rounded_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The O that ``simulated`` reads."""
    scores = (q.double().transpose(1, 2) @ k.double().transpose(1, 2).mT) * D**-0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    out = weights.to(q.dtype).double() @ v.double().transpose(1, 2) / weights.sum(-1, keepdim=True)
    return out.transpose(1, 2).to(q.dtype)


def failures(dtype: torch.dtype, queries: int, keys: int, bits: int | None, seeds: int = 10) -> int:
    """Of so many seeds."""
    count = 0
    for seed in range(seeds):
        q, k, v, dout = tensors(dtype, queries, keys, seed)
        try:
            check_gradients(simulated(q, k, v, dout, bits), q, k, v, dout, out=rounded_output(q, k, v))
        except AssertionError:
            count += 1
    return count


@pytest.mark.parametrize("keys", [2, 3])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
def test_with_few_keys_a_rounded_output_alone_passes_the_error_of_eager_pytorch(
    dtype: torch.dtype, keys: int
) -> None:
    """Nothing else is rounded, and the strict bound fails: no kernel that keeps O could hold it."""
    over = 0
    for seed in range(20):
        q, k, v, dout = tensors(dtype, 1, keys, seed)
        exact = reference_gradients(q, k, v, dout).dq
        error = _rms(simulated(q, k, v, dout, None, rounds_dS=False)["dq"] - exact)
        over += error > MAX_RMS_RATIO * _rms(eager_gradients(q, k, v, dout).dq - exact)
    assert over >= 4


@pytest.mark.parametrize("keys", [1, 2, 3, 4, 8, 33])
@pytest.mark.parametrize("queries", [1, 2, 5, 15])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
def test_the_roundings_of_the_kernels_keep_the_bounds_of_few_rows(
    dtype: torch.dtype, queries: int, keys: int
) -> None:
    """P of 11 bits in dS. None fails by chance."""
    assert failures(dtype, queries, keys, 11) == 0


@pytest.mark.parametrize("keys", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
def test_the_roundings_of_the_kernels_keep_the_strict_bounds_of_many_rows(
    dtype: torch.dtype, keys: int
) -> None:
    """With ``FEW_KEYS`` against the gradients of the rounded output, with more against the exact ones."""
    assert failures(dtype, 200, keys, 11, seeds=4) == 0


@pytest.mark.parametrize("queries", [17, 65])
@pytest.mark.parametrize("keys", [3, 8, 64])
def test_the_bounds_still_see_P_of_8_bits_in_half_precision(queries: int, keys: int) -> None:
    assert failures(HALF, queries, keys, 8, seeds=3) == 3


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("keys", [2, 8])
def test_few_rows_still_see_P_of_8_bits_in_half_precision(queries: int, keys: int) -> None:
    """Of a few rows not in every draw, but in half of them."""
    assert failures(HALF, queries, keys, 8) >= 5


@pytest.mark.parametrize("queries", [1, 17])
def test_the_bounds_see_a_wrong_delta(queries: int) -> None:
    q, k, v, dout = tensors(BFLOAT, queries, 3, 0)
    off = reference_gradients(q, k, v, dout, torch.full((2, HEADS, queries), 0.1))
    with pytest.raises(AssertionError, match=r"dq is off by .*, eager PyTorch by"):
        check_gradients({"dq": off.dq}, q, k, v, dout, out=rounded_output(q, k, v))


def test_an_output_that_is_not_known_gives_no_room() -> None:
    """The strict bound then, also with few keys: who wants more hands the output over."""
    failed = 0
    for seed in range(10):
        q, k, v, dout = tensors(BFLOAT, 65, 2, seed)
        found = simulated(q, k, v, dout, 11)
        check_gradients(found, q, k, v, dout, out=rounded_output(q, k, v))
        try:
            check_gradients(found, q, k, v, dout)
        except AssertionError:
            failed += 1
    assert failed


@pytest.mark.parametrize("rows", [FEW_ROWS // HEADS // 2, 65])
def test_with_more_than_few_keys_the_bound_is_the_strict_one(rows: int) -> None:
    q, k, v, dout = tensors(BFLOAT, rows, FEW_KEYS + 1, 0)
    exact = reference_gradients(q, k, v, dout).dq
    eager = _rms(eager_gradients(q, k, v, dout).dq - exact)
    noise = eager * torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).sign()
    out = rounded_output(q, k, v)
    check_gradients({"dq": exact + noise}, q, k, v, dout, out=out)
    with pytest.raises(AssertionError, match=r"\(RMS\), eager PyTorch by .*1\.1 times that$"):
        check_gradients({"dq": exact + 1.3 * noise}, q, k, v, dout, out=out)


def test_gradients_of_a_rounded_output() -> None:
    """They are what a pass that rounds nothing but O finds; V's know of no O."""
    q, k, v, dout = tensors(HALF, 5, 3, 2)
    right, own = (
        reference_gradients(q, k, v, dout),
        gradients_of_output(rounded_output(q, k, v), q, k, v, dout),
    )
    wide = (x.float() for x in (q, k, v, dout))
    found = simulated(*wide, None, rounds_dS=False, kept=HALF)
    for name in ("dq", "dk"):
        exact, mine = getattr(right, name), getattr(own, name)
        assert _rms(found[name] - mine) < 0.05 * _rms(exact - mine)
    assert torch.equal(own.dv, right.dv)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}, {"window": (3, 1)}], ids=str)
def test_the_most_that_roundings_make_is_a_few_times_what_they_make(options: dict[str, Any]) -> None:
    """Grouped heads and masks: no element of a pass is beyond it, and the largest come near it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, n, h, D, generator=generator).half() for n, h in SHAPES)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, return_lse=True, **options)
    dlse = torch.randn(lse.shape, generator=generator)
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    own = gradients_of_output(out.detach(), q, k, v, dout, dlse, **options)
    most = most_by_rounding(q, k, v, dout, dlse, out.detach(), **options)
    for name, x, right in zip(most, found, own, strict=False):
        share = ((x.double() - right).abs() / (most[name] + 1e-6)).max()
        assert 0.1 < share <= 1, (name, share)


SHAPES = ((12, 4), (12, 2), (12, 2), (12, 4))
