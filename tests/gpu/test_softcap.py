"""Soft caps on the Hopper family where a step's scores leave the range of the series, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_attention import attention
from flash_helpers import build
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.forward.sets import choose_hopper_kernel
from flash_helpers.kernels.kernel import ForwardKernel
from flash_helpers.kernels.traits import ForwardTraits
from flash_helpers.test.reference import reference

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)

KEYS = 700
LARGE = {"one key": (40,), "two tiles": (40, 300), "the last key": (KEYS - 1,), "none": ()}
CAPS = (5.0, 15.0, 30.0, 50.0, 300.0)
KERNELS = [
    (64, 512, False, False), (64, 9000, True, False), (128, 9000, False, False), (128, 512, True, True),
    (128, 9000, True, False), (256, 512, False, False),
]  # fmt: skip
# Of the cap: in the range of the long series, twice, and beyond.
FACTORS = [
    (DType.BF16, 0.9), (DType.BF16, 0.35), (DType.BF16, 2.0), (DType.FP16, 0.55), (DType.FP16, 4.0),
]  # fmt: skip


def inputs(d_head: int, dtype: DType, softcap: float, large: tuple[int, ...], factor: float) -> list[Tensor]:
    """Scores within a fifth of the cap, but for some keys, whose scores are ``factor`` caps either way."""
    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v = (torch.randn(2, n, 2, d_head, device="cuda", generator=generator) for n in (300, KEYS, KEYS))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    k *= softcap * d_head**0.5 / 5 / (q.flatten(0, 2) @ k.flatten(0, 2).mT).abs().max()
    for key in large:
        direction = q[:, key % 300]
        k[:, key] = factor * softcap * d_head**0.5 * direction
        k[:, key - 1] = -k[:, key]
    return [x.to(dtype.to_torch_dtype()) for x in (q, k, v)]


def capped_kernel(dtype: DType, d_head: int, seq_len: int, causal: bool, exact: bool) -> ForwardKernel:
    """The kernel of a soft cap for so many queries."""
    traits = ForwardTraits(causal=causal, softcap=True)
    return choose_hopper_kernel(dtype, d_head, causal, seq_len, exact, traits=traits)[0]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """All of them, in parallel."""
    build.build_kernels([capped_kernel(dtype, *kernel) for dtype in DType for kernel in KERNELS], [90])


@pytest.mark.parametrize("softcap", CAPS)
@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize(("d_head", "seq_len", "causal", "exact"), KERNELS)
def test_scores_that_leave_the_range(softcap, large, d_head, seq_len, causal, exact):
    for dtype, factor in FACTORS:
        kernel = capped_kernel(dtype, d_head, seq_len, causal, exact)
        q, k, v = inputs(d_head, dtype, softcap, large, factor)
        options = {"causal": causal, "softcap": softcap}
        out, lse = attention(q, k, v, config=kernel.config, return_lse=True, **options)
        right, right_lse = reference(q, k, v, **options)
        unit = 2.0**-8 if dtype is DType.BF16 else 2.0**-11
        assert (out.double() - right).abs().max() < 2.5 * unit * v.abs().max()
        assert (lse.double() - right_lse).abs().max() < 1e-3
        again = attention(q, k, v, config=kernel.config, **options)
        assert torch.equal(out, again)


def test_what_is_not_finite_shows():
    q, k, v = inputs(128, DType.BF16, 30.0, (), 1.0)
    k[0, 100, 0, 5] = float("nan")
    q[1, 7, 1, 3] = float("inf")
    kernel, _ = choose_hopper_kernel(DType.BF16, 128, False, 9000, traits=ForwardTraits(softcap=True))
    out = attention(q, k, v, config=kernel.config, softcap=30.0)
    right, _ = reference(q, k, v, softcap=30.0)
    assert torch.equal(out.isnan(), right.isnan())
    assert right.isnan().any()
    assert right.isfinite().any()


def test_a_score_of_either_infinity_is_the_cap():
    # The products overflow float32 or come close; tanh is 1 or -1 there.
    q, k, v = inputs(64, DType.BF16, 30.0, (), 1.0)
    k[:, 40] = 1e30 * k[:, 40].sign()
    q[:, :50] = 1e30 * q[:, :50].sign()
    kernel, _ = choose_hopper_kernel(DType.BF16, 64, False, 9000, traits=ForwardTraits(softcap=True))
    out = attention(q, k, v, config=kernel.config, softcap=30.0)[:, 50:]
    right, _ = reference(q, k, v, softcap=30.0)
    assert (out.double() - right[:, 50:]).abs().max() < 2.0**-6 * v.abs().max()
