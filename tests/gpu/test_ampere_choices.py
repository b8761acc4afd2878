"""Every kernel that the Ampere choices name, and the ladder of speed, on all shapes with both masks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from test_shapes import SHAPES, Shape, expected, inputs

from flash_attention.backends import cuda
from flash_attention.errors import KernelLaunchError
from flash_helpers.kernel_configs import DType, ForwardKernel, ForwardTraits, SoftmaxReference, get_ladder
from flash_helpers.kernels.ampere.forward.choices import choose_ampere_kernel, get_ampere_best_kernels
from flash_helpers.test.utils import error_stats

# Those of all GPUs that fit this one: with other block sizes and stages, they are right here too.
CAPABILITIES = ((8, 0), (8, 6), (9, 0))
CHOSEN = {kernel for capability in CAPABILITIES for kernel in get_ampere_best_kernels(capability=capability)}
LADDER = {
    ForwardKernel(rung.config, ForwardTraits(causal=causal))
    for d_head in (64, 128, 256)
    for causal in (False, True)
    for rung in get_ladder("ampere", DType.BF16, d_head, causal)
}
WARP_PAIRS = choose_ampere_kernel(DType.BF16, 256, causal=False, seq_len=4096)[0].config
PAIRS = {
    ForwardKernel(replace(WARP_PAIRS, **change), ForwardTraits(causal=causal))
    for change in (
        dict(),
        dict(dtype=DType.FP16, softmax_reference=SoftmaxReference.EXACT_SKIP_RESCALE),
        dict(softmax_reference=SoftmaxReference.EXACT, tensor_row_sums=False),
        dict(tensor_row_sums=False),
        dict(B_c=32, kv_stages=3, mbarrier=False),
        dict(d_head=128, tensor_row_sums=False),
    )
    for causal in (False, True)
}
KERNELS = sorted(CHOSEN | LADDER | PAIRS)
ANCHORED = [kernel for kernel in KERNELS if kernel.config.softmax_reference == SoftmaxReference.ANCHORED]


def check(kernel: ForwardKernel, shape: Shape) -> None:
    """Output and LSE near the float64 reference, and the same bits in two calls."""
    config, causal = kernel.config, kernel.traits.causal
    case = (shape, config.dtype, config.d_head, config.d_head)
    q, k, v = inputs(*case)
    out, lse, allowed = expected(*case, causal)
    scale = config.d_head**-0.5 if shape.scale is None else shape.scale
    results = []
    for _ in range(2):
        o = torch.full_like(q, math.nan)
        given_lse = torch.full(lse.shape, math.nan, device="cuda") if config.writes_lse else None
        cuda.forward(kernel, q, k, v, o, given_lse, scale)
        results.append((o, given_lse))
    (o, given_lse), (again, lse_again) = results
    assert torch.equal(o, again), f"{shape}: two equal calls differ"
    error = error_stats(o, out)
    assert error.rel_frobenius <= 2 * allowed.rel_frobenius + 1e-6, f"{shape}: {error}, allowed {allowed}"
    assert error.max_abs <= 2 * allowed.max_abs + 1e-5, f"{shape}: {error}, allowed {allowed}"
    if given_lse is not None:
        assert torch.equal(given_lse, lse_again), f"{shape}: two equal calls differ in LSE"
        torch.testing.assert_close(given_lse.double(), lse, atol=1e-3, rtol=2e-6)


@pytest.mark.parametrize("kernel", KERNELS, ids=ForwardKernel.short_form)
def test_choices_are_right_on_every_shape(kernel: ForwardKernel) -> None:
    for shape in SHAPES:
        check(kernel, shape)


@pytest.mark.parametrize("kernel", KERNELS, ids=ForwardKernel.short_form)
def test_choices_take_any_scale(kernel: ForwardKernel) -> None:
    for scale in (-0.2, 0.05):
        check(kernel, Shape(1, 200, 200, 2, 2, "randn", scale))


def attention_fp64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[-1] ** -0.5
    if causal:
        n = q.shape[1]
        scores.masked_fill_(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())


@pytest.mark.parametrize("growth", [20, 70, 110, 300, 3000])
@pytest.mark.parametrize("kernel", ANCHORED, ids=ForwardKernel.short_form)
def test_scores_that_outgrow_the_first_blocks(kernel: ForwardKernel, growth: int) -> None:
    """Key 5, which is visited last, has a score 2^growth times above all that were seen before it."""
    seq_len, d = 640, kernel.config.d_head
    q = torch.zeros(1, seq_len, 2, d, dtype=torch.bfloat16, device="cuda")
    k, v = torch.zeros_like(q), torch.randn(q.shape, device="cuda").bfloat16()
    q[..., 0] = 16.0
    k[..., 0] = 0.0
    k[:, 5, :, 0] = growth * math.log(2) * d**0.5 / 16.0
    o = torch.full_like(q, math.nan)
    cuda.forward(kernel, q, k, v, o, None, d**-0.5)
    wanted = attention_fp64(q, k, v, kernel.traits.causal)
    torch.testing.assert_close(o.double(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kernel", ANCHORED[:4], ids=ForwardKernel.short_form)
def test_large_values_do_not_overflow_an_anchored_sum(kernel: ForwardKernel) -> None:
    """P up to 2^60 times V up to 2^66 stays within float32. Within two roundings: P and O, 2^-9 each."""
    d = kernel.config.d_head
    q = torch.zeros(1, 512, 1, d, dtype=torch.bfloat16, device="cuda")
    k, v = torch.zeros_like(q), torch.full_like(q, 2.0**60)
    q[..., 0] = 16.0
    k[:, :64, :, 0] = 50 * math.log(2) * d**0.5 / 16.0
    o = torch.full_like(q, math.nan)
    cuda.forward(kernel, q, k, v, o, None, d**-0.5)
    torch.testing.assert_close(o, v, rtol=2**-8, atol=0.0)


def test_an_lse_is_refused_where_rows_are_summed_on_the_tensor_cores() -> None:
    kernel = next(k for k in KERNELS if not k.config.writes_lse and k.config.dtype == DType.BF16)
    q = torch.zeros(1, 128, 1, kernel.config.d_head, dtype=torch.bfloat16, device="cuda")
    lse = torch.zeros(1, 1, 128, device="cuda")
    with pytest.raises(KernelLaunchError, match="tensor_row_sums"):
        cuda.forward(kernel, q, q, q, torch.empty_like(q), lse, 0.1)
