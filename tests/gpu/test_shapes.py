"""Both families on the shapes that ``forward`` refuses and the backend must get right: tails, unequal
lengths, grouped heads, causal masks, rows without keys, peaked and jumping scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from flash_attention.backends import cuda
from flash_helpers.kernel_configs import (
    DType,
    FlashForwardKernelConfig,
    ForwardKernel,
    ForwardTraits,
    HopperForwardKernelConfig,
    NextItem,
    choose_hopper_kernel,
    get_hopper_kernels_to_build,
)
from flash_helpers.test.utils import error_stats, py_flash_attention, reference


@dataclass(frozen=True)
class Shape:
    """(batch, seq_len_q, seq_len_k, n_heads, n_heads_kv) and the kind of scores."""

    batch: int
    seq_len_q: int
    seq_len_k: int
    n_heads: int
    n_heads_kv: int
    kind: str = "randn"
    scale: float | None = None


SHAPES = (
    Shape(2, 512, 512, 4, 4),
    Shape(1, 777, 777, 3, 3),
    Shape(1, 300, 1000, 4, 2),
    Shape(3, 64, 130, 2, 1),
    Shape(1, 500, 130, 2, 2),  # causal: 370 rows without a key
    Shape(2, 1, 333, 4, 1),
    Shape(1, 2048, 2048, 2, 2),
    Shape(5, 700, 700, 8, 8),
    Shape(1, 1111, 1111, 4, 4, "peaked"),
    Shape(1, 1024, 1024, 2, 2, "jump"),
    Shape(1, 1500, 1500, 2, 2, "jump"),
    Shape(1, 256, 256, 2, 2, "randn", 0.0),
)


def ampere(dtype: DType, d_head: int, B_r: int, B_c: int, n_warps: int, **change) -> FlashForwardKernelConfig:
    values = dict(
        async_copy=True,
        eager_load_blocks=True,
        swizzled=True,
        Q_mma_load_K_tiles=2,
        K_mma_load_K_tiles=2,
        V_mma_load_K_tiles=2,
        mma_double_buffer_loads=False,
        optimized_softmax=True,
    )
    return FlashForwardKernelConfig(dtype, d_head, B_r, B_c, n_warps, **(values | change))


AMPERE = [
    ForwardKernel(config, ForwardTraits(causal=causal))
    for config in (
        ampere(DType.BF16, 128, 128, 64, 4),
        ampere(DType.FP16, 128, 64, 64, 4, Q_mma_load_K_tiles=0, optimized_softmax=False),
        ampere(DType.FP16, 128, 64, 64, 4, async_copy=False, eager_load_blocks=False, swizzled=False),
        ampere(DType.BF16, 64, 128, 128, 8, mma_double_buffer_loads=True),
        ampere(DType.FP16, 64, 64, 32, 4, Q_mma_load_K_tiles=0, eager_load_blocks=False),
    )
    for causal in (False, True)
]


def hopper(d_head: int, seq_len: int, causal: bool, **changes: object) -> ForwardKernel:
    """The kernel chosen for so many queries, with some fields changed."""
    kernel, _ = choose_hopper_kernel(DType.BF16, d_head, causal, seq_len)
    return replace(kernel, config=replace(kernel.config, **changes))


HOPPER = [
    *get_hopper_kernels_to_build(),
    # ideas that no choice has
    hopper(128, 4096, False, paired_blocks=True),
    hopper(256, 512, False, paired_blocks=True, extra_k_stages=1, prefetch_next=3),
    hopper(256, 512, True, prefetch_next=9),
    # pairs: numbers from a counter and in rounds, tiles divided by panels and by rows, too few slots to
    # pass tiles
    hopper(256, 4096, True, dynamic_schedule=False),
    hopper(128, 512, True, paired_blocks=True),
    hopper(128, 4096, True, paired_blocks=True),
    hopper(64, 2048, False, paired_blocks=True),
    hopper(64, 2048, True, paired_blocks=True),
    hopper(64, 2048, True, paired_blocks=True, next_item=NextItem.NONE),
    hopper(192, 512, True, paired_blocks=True),
    hopper(128, 512, True, prefetch_next=2),
    hopper(128, 4096, True, half_tiles=True),
    hopper(128, 512, True, q_register_steps=8),
    hopper(128, 4096, False, q_register_steps=4, paired_blocks=True),
    hopper(256, 512, False, q_register_steps=4),
]


@cache
def inputs(
    shape: Shape, dtype: DType, d_head: int, d_head_v: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(shape.seq_len_q + d_head)
    sizes = (
        (shape.batch, shape.seq_len_q, shape.n_heads, d_head),
        (shape.batch, shape.seq_len_k, shape.n_heads_kv, d_head),
        (shape.batch, shape.seq_len_k, shape.n_heads_kv, d_head_v),
    )
    q, k, v = (torch.randn(size, device="cuda", generator=generator) for size in sizes)
    if shape.kind == "peaked":
        q *= 4
    if shape.kind == "jump":  # later tiles exceed the first by hundreds of powers of two
        q *= 8
        k *= 10
        k[:, -256:] *= 0.001
    return tuple(x.to(dtype.to_torch_dtype()) for x in (q, k, v))


@cache
def expected(shape: Shape, dtype: DType, d_head: int, d_head_v: int, causal: bool):
    q, k, v = inputs(shape, dtype, d_head, d_head_v)
    out, lse = reference(q, k, v, causal=causal, softmax_scale=shape.scale)
    same_precision = py_flash_attention(q, k, v, causal=causal, softmax_scale=shape.scale)
    return out, lse, error_stats(same_precision.nan_to_num(), out)  # PyTorch's rows without keys are NaN


def run(kernel: ForwardKernel, shape: Shape) -> None:
    config, causal = kernel.config, kernel.traits.causal
    d_head_v = config.d_head_v if isinstance(config, HopperForwardKernelConfig) else config.d_head
    case = (shape, config.dtype, config.d_head, d_head_v)
    q, k, v = inputs(*case)
    out, lse, allowed = expected(*case, causal)
    scale = config.d_head**-0.5 if shape.scale is None else shape.scale
    results = []
    for _ in range(2):
        o = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype, device="cuda")
        given_lse = torch.full(lse.shape, math.nan, device="cuda")
        cuda.forward(kernel, q, k, v, o, given_lse, scale)
        results.append((o, given_lse))
    (o, given_lse), (again, lse_again) = results
    assert torch.equal(o, again), f"{shape}: two equal calls differ"
    assert torch.equal(given_lse, lse_again), f"{shape}: two equal calls differ in LSE"
    error = error_stats(o, out)
    assert error.rel_frobenius <= 2 * allowed.rel_frobenius + 1e-6, f"{shape}: {error}, allowed {allowed}"
    assert error.max_abs <= 2 * allowed.max_abs + 1e-5, f"{shape}: {error}, allowed {allowed}"
    torch.testing.assert_close(given_lse.double(), lse, atol=1e-3, rtol=2e-6)


@pytest.mark.parametrize("kernel", AMPERE, ids=ForwardKernel.short_form)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ampere(kernel: ForwardKernel, shape: Shape) -> None:
    run(kernel, shape)


@pytest.mark.parametrize("scale", [-0.2, 0.05])
@pytest.mark.parametrize("kernel", AMPERE, ids=ForwardKernel.short_form)
def test_ampere_takes_any_scale(kernel: ForwardKernel, scale: float) -> None:
    run(kernel, Shape(1, 200, 200, 2, 2, "randn", scale))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)
@pytest.mark.parametrize("kernel", HOPPER, ids=ForwardKernel.short_form)
def test_hopper(kernel: ForwardKernel) -> None:
    for shape in SHAPES:
        run(kernel, shape)
