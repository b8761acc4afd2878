"""Faults that backward passes of attention are known for, each as a small input with its right answer.

Those that a line of docs/contract.md names are tested there (``test_gradients.py``): sequences of one key,
large scores, the derivative of a soft cap, and masks with lengths that fill no tile (C40), inputs that no
gradient needs (C42), queries without keys and padding between sequences (C43), strides of the output's
gradient (C44). Keys that travel around a ring: ``tests/distributed/test_threads.py``. Orders in which blocks
add and wait, as graphs: ``tests/cpp/hopper/test_backward_item_order.cpp``.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention import attention, attention_varlen, backward
from flash_attention.flash_attn_interface import flash_attn_qkvpacked_func, flash_attn_varlen_qkvpacked_func
from flash_attention.run import launch_cache
from flash_helpers.kernel_configs import DType
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.problem import BACKWARD
from flash_helpers.test.gradients import NAMES, check_gradients
from flash_helpers.test.reference import reference_gradients

HALF, BFLOAT = torch.float16, torch.bfloat16


def randn(device: str, *shape: int, seed: int = 0, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def check(device: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> dict[str, Tensor]:
    """Gradients of a call, compared with float64."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, **options)
    dout = randn(device, *out.shape, seed=9, dtype=q.dtype)
    found = dict(zip(NAMES, torch.autograd.grad(out, leaves, dout), strict=False))
    options = {n: x for n, x in options.items() if n != "deterministic"}
    check_gradients(found, q, k, v, dout, out=out.detach(), **options)
    return found


# ---------------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    "sizes", [(128, 96), (96, 128), (64, 128), (128, 64), (192, 128), (256, 8), (8, 256), (72, 200)], ids=str
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_head_sizes_of_v_that_fill_no_tile(device: str, sizes: tuple[int, int], causal: bool) -> None:
    """dV was wrong at 128/96, whose columns do not fill a tile."""
    d, d_v = sizes
    check(
        device, randn(device, 1, 100, 2, d), randn(device, 1, 130, 1, d, seed=1),
        randn(device, 1, 130, 1, d_v, seed=2), causal=causal,
    )  # fmt: skip


@pytest.mark.parametrize("group", [3, 5, 7])
def test_groups_that_are_no_power_of_two(device: str, group: int) -> None:
    """Which query heads add to a kv head, with another head size for v."""
    q = randn(device, 2, 70, 2 * group, 64)
    k, v = randn(device, 2, 90, 2, 64, seed=1), randn(device, 2, 90, 2, 40, seed=2)
    check(device, q, k, v, causal=True)


def test_rows_further_apart_than_32_bits(device: str) -> None:
    """Inputs and gradients with a batch stride of 2^31 elements."""
    shape, kind = (2, 64, 1, 64), BFLOAT
    config = next(
        kernel.config
        for kernel in directions(BACKWARD)[0].built()
        if (kernel.config.dtype, kernel.config.d_head, kernel.config.d_head_v) == (DType.BF16, 64, 64)
    )
    base, grads = (torch.empty(2**31 + 16384, dtype=kind, device=device) for _ in range(2))

    def spread(x: Tensor, offset: int) -> Tensor:
        return x[offset:].as_strided(shape, (2**31, 64, 64, 1))

    q, k, v, dout = (spread(base, 4096 * i) for i in range(4))
    for i, x in enumerate((q, k, v, dout)):
        x.copy_(randn(device, *shape, seed=i, dtype=kind))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    outputs = {name: spread(grads, 4096 * i) for i, name in enumerate(NAMES[:3])}
    found = backward(config, dout, q, k, v, out, lse, causal=True, **outputs)
    assert all(x is y for x, y in zip(found, outputs.values(), strict=True))
    check_gradients(outputs, *(x.contiguous() for x in (q, k, v, dout)), out=out, causal=True)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    by_autograd = torch.autograd.grad(attention(*leaves, causal=True), leaves, dout)
    check_gradients(
        dict(zip(NAMES, by_autograd, strict=False)), *(x.contiguous() for x in (q, k, v, dout)), causal=True
    )


# ---------------------------------------------------------------------- packed sequences
@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_sequences_without_queries_or_keys_beside_others(device: str, d: int, deterministic: bool) -> None:
    """Empty items write nothing, and fewer keys than queries leave no NaN."""
    lengths = [(0, 40), (33, 0), (90, 20), (1, 1), (0, 0), (20, 90), (5, 130)]
    ends = [[0, *itertools.accumulate(n)] for n in zip(*lengths, strict=True)]
    q = randn(device, ends[0][-1], 2, d)
    k, v = (randn(device, ends[1][-1], 1, d, seed=seed) for seed in (1, 2))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    offsets = [torch.tensor(end, dtype=torch.int32, device=device) for end in ends]
    out = attention_varlen(*leaves, *offsets, 90, 130, causal=True, deterministic=deterministic)
    dout = randn(device, *out.shape, seed=9)
    found = torch.autograd.grad(out, leaves, dout)
    assert all(x.isfinite().all() for x in found)
    for (n_q, n_k), first_q, first_k in zip(lengths, *ends, strict=False):
        rows_q, rows_k = slice(first_q, first_q + n_q), slice(first_k, first_k + n_k)
        one = {
            name: x[None, rows] for name, x, rows in zip(NAMES, found, (rows_q, rows_k, rows_k), strict=False)
        }
        check_gradients(
            one, q[None, rows_q], k[None, rows_k], v[None, rows_k], dout[None, rows_q], causal=True,
            few_keys=True, out=out.detach()[None, rows_q],
        )  # fmt: skip


# ---------------------------------------------------------------------- masks
@pytest.mark.parametrize("window", [(40, 0), (3, None), (100, 20), (-5, 60)], ids=str)
@pytest.mark.parametrize("seq_lens", [(300, 300), (40, 500), (500, 90)], ids=str)
def test_repeatable_gradients_under_a_window_end(
    device: str, window: tuple[int | None, int | None], seq_lens: tuple[int, int]
) -> None:
    """Blocks that a window hides never tell those who wait for them: such orders waited for ever.

    On a GPU a test that hangs ends the run (``GPU_TEST_TIMEOUT_S``).
    """
    q = randn(device, 1, seq_lens[0], 2, 64)
    k, v = (randn(device, 1, seq_lens[1], 1, 64, seed=seed) for seed in (1, 2))
    first = check(device, q, k, v, window=window, deterministic=True)
    again = check(device, q, k, v, window=window, deterministic=True)
    for name, x in first.items():
        assert torch.equal(x, again[name]), name


@pytest.mark.parametrize("size", [48, 100])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_blocks_of_a_mask(device: str, size: int, seed: int) -> None:
    """Blocks that are no tile of a kernel, of either pass: gradients went wrong where the passes cut a mask
    into blocks of two sizes. Some rows of blocks see nothing."""
    generator = torch.Generator().manual_seed(seed)
    n_q, n_k = 330, 420
    blocks = torch.rand(-(-n_q // size), -(-n_k // size), generator=generator) < 0.4
    blocks[1], blocks[:, 2] = False, False
    blocks = blocks.to(device)
    q, k, v = (
        randn(device, 1, n, heads, 64, seed=i) for i, (n, heads) in enumerate(((n_q, 4), (n_k, 2), (n_k, 2)))
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return blocks[i // size, j // size]

    out, lse = attention(*leaves, mask_mod=mask, return_lse=True)
    dout, dlse = randn(device, *out.shape, seed=9), randn(device, *lse.shape, seed=8, dtype=torch.float32)
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    right = reference_gradients(q, k, v, dout, dlse, mask_mod=mask)
    for name, x in zip(NAMES, found, strict=False):
        torch.testing.assert_close(x.double(), getattr(right, name), atol=6e-3, rtol=6e-3)
    assert not found[0][:, size : 2 * size].any()
    for x in found[1:]:
        assert not x[:, 2 * size : 3 * size].any()


def test_rows_that_a_sink_of_nothing_leaves_empty(device: str) -> None:
    """exp(-inf - -inf) is 0: no key, and a sink of -inf."""
    sinks = torch.tensor([-math.inf, 0.5], device=device, requires_grad=True)
    q = randn(device, 1, 90, 2, 64).requires_grad_()
    k = randn(device, 1, 30, 2, 64, seed=1).requires_grad_()
    out, lse = attention(q, k, k, causal=True, sinks=sinks, return_lse=True)
    found = torch.autograd.grad((out, lse), (q, k, sinks), (torch.ones_like(out), torch.ones_like(lse)))
    assert all(x.isfinite().all() for x in found)
    assert not found[0][:, :60].any()
    assert found[2][0] == 0


# ---------------------------------------------------------------------- memory and what calls remember
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x01], ids=hex)
def test_workspaces_may_hold_anything_before(device: str, deterministic: bool, byte: int) -> None:
    """Counters of an order that were not cleared made kernels wait for ever, and sums begin with them."""
    q, k, v = (randn(device, 1, 200, heads, 128, seed=i) for i, heads in enumerate((4, 2, 2)))
    for _ in range(2):
        if device == "cuda":
            torch.cuda.synchronize()
            left = [
                torch.full((n,), byte, dtype=torch.uint8, device=device) for n in (1 << 16, 1 << 20, 1 << 23)
            ]
            del left  # the allocator hands this memory out again
        check(device, q, k, v, causal=True, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_an_output_gradient_that_comes_late(device: str, d: int, deterministic: bool) -> None:
    """A kernel that is set up while the one before it ends has to wait before it reads what that one writes:
    dQ and dK were made of the gradient that had been there before."""
    q, k, v = (randn(device, 1, 200, heads, d, seed=i) for i, heads in enumerate((4, 2, 2)))
    ready = randn(device, 1, 200, 4, d, seed=9)
    expected = check(device, q, k, v, causal=True, deterministic=deterministic)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    slow = torch.randn(*(2 * [4096 if device == "cuda" else 8]), device=device)
    for _ in range(5):
        out = attention(*leaves, causal=True, deterministic=deterministic)
        late = torch.full_like(ready, math.nan)
        for _ in range(4):
            slow = (slow @ slow).clamp_(-1, 1)
        late.copy_(ready + 0 * slow[0, 0].half())
        found = torch.autograd.grad(out, leaves, late)
        for name, x in zip(NAMES, found, strict=False):
            if deterministic:
                assert torch.equal(x, expected[name]), name
            torch.testing.assert_close(x, expected[name], atol=4e-3, rtol=4e-3)


def test_strides_of_0_are_no_part_of_what_is_remembered(device: str) -> None:
    """Dense, broadcast, dense again: each call goes by its own strides."""
    launch_cache.forget()
    dense = randn(device, 2, 80, 4, 64, seed=1)
    for k in (dense, dense[:1].expand(2, -1, -1, -1), dense, dense[:, :, :1].expand(-1, -1, 4, -1), dense):
        for dout_of in (lambda out: randn(device, *out.shape, seed=9), lambda out: out.new_ones(1, 1, 1, 1)):
            leaves = [x.detach().requires_grad_() for x in (randn(device, 2, 80, 4, 64), k, dense)]
            out = attention(*leaves, causal=True)
            dout = dout_of(out).expand(out.shape)
            found = torch.autograd.grad(out, leaves, dout)
            check_gradients(
                dict(zip(NAMES, found, strict=False)), *(x.detach() for x in leaves), dout, causal=True
            )


# ---------------------------------------------------------------------- compatible names
def test_the_number_of_gradients_of_packed_projections(device: str) -> None:
    """A function of one tensor has one gradient, of its shape."""
    qkv = randn(device, 2, 60, 3, 2, 64).requires_grad_()
    out = flash_attn_qkvpacked_func(qkv, causal=True)
    dout = randn(device, *out.shape, seed=9)
    (found,) = torch.autograd.grad(out, qkv, dout)
    assert found.shape == qkv.shape
    parts = dict(zip(NAMES, found.unbind(2), strict=False))
    check_gradients(parts, *qkv.detach().unbind(2), dout, causal=True)
    ends = torch.tensor([0, 60, 120], dtype=torch.int32, device=device)
    flat = qkv.detach().flatten(0, 1).requires_grad_()
    rows = flash_attn_varlen_qkvpacked_func(flat, ends, 60, causal=True)
    (again,) = torch.autograd.grad(rows, flat, dout.flatten(0, 1))
    torch.testing.assert_close(again.view(found.shape), found, atol=2e-3, rtol=2e-3)
