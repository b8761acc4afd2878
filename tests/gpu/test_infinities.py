"""NaN and infinities, in scores and sinks, in both families: what the float64 reference makes of them.

Scores get them from the first column of k, where q is 1. Blocks of keys are visited from the last to the
first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from trait_calls import TOLERANCE, Call, Case

from flash_attention import forward
from flash_attention.backends import cuda
from flash_helpers.kernel_configs import (
    DType,
    FlashForwardKernelConfig,
    ForwardKernel,
    ForwardTraits,
    SoftmaxReference,
    choose_hopper_kernel,
    get_ladder,
    parse_kernel_name_into_config,
)
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.test.utils import reference

FP16, BF16 = DType.FP16, DType.BF16
PLAIN = FlashForwardKernelConfig(FP16, 64, 64, 64, 4, True, True, True, 0, 2, 2, False, True)
RING = replace(
    PLAIN, dtype=BF16, B_r=128, Q_mma_load_K_tiles=1, K_mma_load_K_tiles=1, V_mma_load_K_tiles=1,
    kv_stages=2, fragments_ahead=1,
)  # fmt: skip
ANCHORED_16 = parse_kernel_name_into_config(
    "(BF16, 64, 64, 16, 4): async+eager+swizzled+load_1_1_1_tiles+opt_softmax+kv_stages_2+anchored"
    "+fragments_ahead_1"
)


def traits(text: str) -> ForwardTraits:
    return ForwardTraits(**dict.fromkeys(text.split(), True))


AMPERE = [
    ForwardKernel(config, traits(text))
    for config, texts in (
        (PLAIN, ("", "causal", "window", "sinks", "split", "sinks split")),
        (replace(PLAIN, optimized_softmax=False), ("", "causal sinks")),
        (replace(RING, softmax_reference=SoftmaxReference.LAGGED), ("", "causal", "split")),
        (replace(RING, softmax_reference=SoftmaxReference.EXACT_SKIP_RESCALE, mbarrier=True), ("causal",)),
        (replace(RING, softmax_reference=SoftmaxReference.ANCHORED), ("", "causal", "window sinks")),
        (ANCHORED_16, ("", "causal")),
    )
    for text in texts
]
HOPPER = sorted(
    {
        choose_hopper_kernel(dtype, d_head, on.causal, seq_len, exact, traits=on)[0]
        for dtype, d_head in ((BF16, 64), (FP16, 128), (BF16, 128), (BF16, 256))
        for seq_len in (512, 4096)
        for exact in (False, True)
        for on in map(traits, ("", "causal"))
    }
    | {
        choose_hopper_kernel(dtype, d_head, on.causal, seq_len, traits=on)[0]
        for dtype, d_head, seq_len, text in (
            (BF16, 128, 512, "window"), (FP16, 64, 4096, "sinks"), (BF16, 128, 512, "causal sinks"),
            (BF16, 128, 1, "split"), (FP16, 64, 512, "causal sinks split"),
        )
        for on in [traits(text)]
    }
    | {
        ForwardKernel(rung.config, ForwardTraits(causal=causal))
        for causal in (False, True)
        for rung in get_ladder("hopper", BF16, 128, causal)
    }
)  # fmt: skip
SM_90 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)
KERNELS = [
    *(pytest.param(kernel, id=kernel.short_form()) for kernel in AMPERE),
    *(pytest.param(kernel, id=kernel.short_form(), marks=SM_90) for kernel in HOPPER),
]
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def compare(kernel: ForwardKernel, edit: Callable[[Call], None]) -> tuple[torch.Tensor, torch.Tensor]:
    """900 queries and keys of two heads, changed by ``edit``, against the reference; gives o and lse."""
    window = (700, 90) if kernel.traits.window else (None, None)
    call = Call(kernel, Case(900, 900, 1, (2, 2), window=window, parts=3 if kernel.traits.split else 0))
    call.q[..., 0] = 1.0
    call.k[..., 0] = 0.0
    edit(call)
    o, lse = call.launch()
    q, k, v = call.sequence(0)
    expected, expected_lse = reference(q, k, v, causal=kernel.traits.causal, window=window, sinks=call.sinks)
    tolerance = TOLERANCE[kernel.config.dtype]
    torch.testing.assert_close(o.double(), expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=2e-6, equal_nan=True)
    return o, lse


def with_traits(wanted: str, unwanted: str = "") -> pytest.MarkDecorator:
    """The kernels that have one trait and lack another."""
    found = [
        x for x in KERNELS
        if getattr(x.values[0].traits, wanted) and not (unwanted and getattr(x.values[0].traits, unwanted))
    ]  # fmt: skip
    assert len(found) > 1
    return pytest.mark.parametrize("kernel", found)


HIDDEN = (
    slice(-300, None), slice(300, 600), slice(None, 700), slice(1, None), slice(None, -1), slice(None),
)  # fmt: skip


@each_kernel
def test_scores_of_minus_infinity_count_as_hidden(kernel: ForwardKernel) -> None:
    for hidden in HIDDEN:

        def edit(call: Call, hidden: slice = hidden) -> None:
            call.k[:, hidden, 0, 0] = -math.inf

        o, _ = compare(kernel, edit)
        assert not o.isnan().any()
        assert hidden != slice(None) or (o[:, :, 0] == 0).all()


@each_kernel
def test_a_score_of_infinity_shows_as_nan(kernel: ForwardKernel) -> None:
    for key in (0, 400, 880, 899):

        def edit(call: Call, key: int = key) -> None:
            call.k[:, key, 0, 0] = math.inf

        o, _ = compare(kernel, edit)
        assert o[:, :, 0].isnan().any()
        assert o[:, :, 1].isfinite().all()


@each_kernel
@pytest.mark.parametrize("growth", [20, 70, 110, 300, 3000])
def test_nan_outlives_scores_that_grow(kernel: ForwardKernel, growth: int) -> None:
    """Scores grow by 2^growth from the last third to the second, and again to the first."""
    for key in (100, 460, 860, 899):

        def edit(call: Call, key: int = key) -> None:
            step = growth * math.log(2) * call.d**0.5
            call.k[:, 300:600, :, 0] = step
            call.k[:, :300, :, 0] = 2 * step
            call.k[:, key, 0, 1] = math.nan

        o, lse = compare(kernel, edit)
        seen = lse[0, 0].isnan()
        assert seen.any()
        assert o[0, seen, 0].isnan().all()
        assert lse[0, 1].isfinite().all()


@each_kernel
def test_nan_beside_scores_of_minus_infinity(kernel: ForwardKernel) -> None:
    """After finite scores have come, and before: all queries that see the key."""
    for key in (100, 300, 700, 899):

        def edit(call: Call, key: int = key) -> None:
            call.k[:, 250:, 0, 0] = -math.inf
            call.k[:, key, 0, 0] = math.nan

        o, lse = compare(kernel, edit)
        seen = lse[0, 0].isnan()
        assert seen[key]
        assert o[0, seen, 0].isnan().all()


@with_traits("split", "causal")
def test_a_nan_value_in_a_part_of_no_weight_is_shown(kernel: ForwardKernel) -> None:
    call = Call(kernel, Case(900, 900, 1, (2, 2), parts=3))
    call.q[..., 0] = 1.0
    call.k[..., 0] = 0.0
    call.k[:, 0, :, 0] = 400 * call.d**0.5  # seen by all queries, with all the weight
    call.v[:, 899, 0, 5] = math.nan
    o, lse = call.launch()
    assert o[:, :, 0, 5].isnan().all()
    assert o.isnan().sum() == 900
    assert lse.isfinite().all()


@with_traits("sinks")
@pytest.mark.parametrize("sink", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("hidden", [slice(0, 0), slice(-300, None), slice(None)], ids=["none", "last", "all"])
def test_sinks_that_are_no_numbers(kernel: ForwardKernel, sink: float, hidden: slice) -> None:
    def edit(call: Call) -> None:
        call.sinks = torch.tensor([sink, 0.5], device="cuda")
        call.k[:, hidden, 0, 0] = -math.inf

    o, lse = compare(kernel, edit)
    if sink == math.inf:
        assert (o[:, :, 0] == 0).all()
        assert (lse[:, 0] == math.inf).all()
    assert o[:, :, 1].isfinite().all()


@pytest.mark.parametrize(
    "config",
    [
        ANCHORED_16,
        *(replace(RING, B_c=B_c, softmax_reference=SoftmaxReference.ANCHORED) for B_c in (32, 64, 128)),
    ],
    ids=lambda config: config.short_form(),
)
@pytest.mark.parametrize("key", [0, 40, 200])
def test_one_score_far_above_an_anchor(config: FlashForwardKernelConfig, key: int) -> None:
    """The query block is computed anew, in the shared memory and the blocks that the launch has."""
    q = torch.ones(2, 384, 2, 64, dtype=torch.bfloat16, device="cuda")
    k, v = torch.zeros_like(q), torch.ones_like(q)
    k[:, key] = 1000.0
    assert (forward(config, q, k, v) == 1).all()
    v[:, key] = 3.0
    for causal in (False, True):
        o, lse = torch.full_like(q, math.nan), torch.full((2, 2, 384), math.nan, device="cuda")
        cuda.forward(ForwardKernel(config, ForwardTraits(causal=causal)), q, k, v, o, lse, 0.125)
        expected, expected_lse = reference(q, k, v, causal=causal, softmax_scale=0.125)
        torch.testing.assert_close(o.double(), expected, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=2e-6)


def test_every_reference_of_the_softmax_is_here() -> None:
    for kernels, family in ((AMPERE, FlashForwardKernelConfig), (HOPPER, HopperForwardKernelConfig)):
        found = {k.config.softmax_reference for k in kernels if isinstance(k.config, family)}
        assert found >= {SoftmaxReference.EXACT, SoftmaxReference.LAGGED}
