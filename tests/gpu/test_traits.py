"""The traits of the Ampere family, each and together, against the float64 reference."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from trait_calls import Call, Case

from flash_attention.backends import cuda
from flash_attention.backends.cuda import Features
from flash_attention.errors import KernelLaunchError
from flash_helpers.kernel_configs import (
    KNOWN_DEVICES,
    DType,
    FlashForwardKernelConfig,
    ForwardKernel,
    ForwardTraits,
    SoftmaxReference,
)
from flash_helpers.kernels.ampere.forward.decode import choose_ampere_decode_config
from flash_helpers.test.utils import reference

FP16, BF16 = DType.FP16, DType.BF16


def kernel(dtype: DType, d_head: int, traits: str, B_r: int = 64, B_c: int = 64, **change) -> ForwardKernel:
    """A kernel with the traits that are named."""
    q_tiles = 0 if B_r == 64 else 2
    config = FlashForwardKernelConfig(
        dtype, d_head, B_r, B_c, 4, True, True, True, q_tiles, 2, 2, False, True
    )
    return ForwardKernel(
        dataclasses.replace(config, **change), ForwardTraits(**dict.fromkeys(traits.split(), True))
    )


NOT_ASYNC = {"async_copy": False, "eager_load_blocks": False}
RING = {  # stages and barriers as the fast kernels have them
    "kv_stages": 2,
    "mbarrier": True,
    "Q_mma_load_K_tiles": 1,
    "K_mma_load_K_tiles": 1,
    "V_mma_load_K_tiles": 1,
    "fragments_ahead": 1,
}
LAGGED = {"softmax_reference": SoftmaxReference.LAGGED}
ANCHORED = {"softmax_reference": SoftmaxReference.ANCHORED}
DECODE = choose_ampere_decode_config(BF16, 128, KNOWN_DEVICES["H100"])

WINDOW = [
    kernel(BF16, 128, "window"),
    kernel(FP16, 64, "window", 128, 32),
    kernel(FP16, 64, "causal window", optimized_softmax=False),
    kernel(FP16, 128, "window", 128, 64, **LAGGED, **RING),
    kernel(BF16, 128, "window", 128, 64, **ANCHORED, **RING),
    kernel(FP16, 64, "window", kv_stages=3),
    kernel(BF16, 64, "window", eager_load_blocks=False),
    kernel(FP16, 128, "causal window", **NOT_ASYNC),
]
SOFTCAP = [
    kernel(BF16, 128, "softcap"),
    kernel(FP16, 64, "causal softcap", optimized_softmax=False),
    kernel(BF16, 128, "causal softcap", 128, 64, **ANCHORED, **RING),
]
SINKS = [kernel(BF16, 128, "sinks"), kernel(FP16, 64, "window sinks", 128, 64)]
VARLEN = [
    kernel(BF16, 128, "causal varlen"),
    kernel(FP16, 64, "causal varlen", 128, 128),
    kernel(FP16, 128, "varlen", swizzled=False, **NOT_ASYNC),
    kernel(BF16, 128, "causal varlen", 128, 64, **ANCHORED, **RING),
]
SPLIT = [kernel(BF16, 128, "split"), kernel(FP16, 64, "causal sinks split", B_c=128)]
VARLEN_SPLIT = [
    kernel(FP16, 128, "varlen split", **LAGGED),
    kernel(BF16, 64, "causal varlen split"),
    ForwardKernel(DECODE, ForwardTraits(varlen=True, split=True)),
]
PAGED = [
    kernel(BF16, 128, "varlen paged"),
    kernel(FP16, 64, "causal varlen paged", 128, 64, **RING),
    kernel(BF16, 128, "causal varlen paged", 128, 64, **ANCHORED, **RING),
    ForwardKernel(DECODE, ForwardTraits(varlen=True, split=True, paged=True)),
    kernel(FP16, 64, "window softcap sinks varlen split padded_head paged", 64, 32),
]
PADDED = [
    kernel(BF16, 64, "padded_head"),
    kernel(FP16, 64, "causal padded_head", **NOT_ASYNC),
    kernel(FP16, 128, "padded_head", 128, 64),
    kernel(BF16, 128, "causal padded_head"),
]
EVERYTHING = [
    kernel(BF16, 128, "window softcap sinks varlen split padded_head"),
    kernel(FP16, 64, "window softcap sinks varlen split padded_head", 128, 32),
]
KERNELS = [*WINDOW, *SOFTCAP, *SINKS, *VARLEN, *SPLIT, *VARLEN_SPLIT, *PAGED, *PADDED, *EVERYTHING]


def each(*kernels: ForwardKernel):
    return pytest.mark.parametrize("kernel", kernels, ids=ForwardKernel.short_form)


# ---------------------------------------------------------------------- masks and scores
@each(*WINDOW)
def test_window(kernel: ForwardKernel) -> None:
    for q, k in ((300, 300), (129, 257), (257, 129), (1, 200), (65, 64)):
        for window in ((0, 0), (17, 0), (0, 70), (64, 64), (200, 3), (None, 5), (130, None), (None, None)):
            Call(kernel, Case(q, k, batch=1, heads=(2, 1), window=window)).check()


@each(*SOFTCAP)
@pytest.mark.parametrize(("softcap", "spread"), [(30.0, 8.0), (50.0, 20.0), (5.0, 1.0), (1e4, 3.0)])
def test_softcap(kernel: ForwardKernel, softcap: float, spread: float) -> None:
    for q, k in ((200, 200), (77, 300)):
        Call(kernel, Case(q, k, heads=(4, 2), softcap=softcap, spread=spread)).check()


@each(*SINKS)
def test_sinks(kernel: ForwardKernel) -> None:
    window = (40, 10) if kernel.traits.window else (None, None)
    for q, k in ((200, 200), (130, 65), (3, 0)):
        Call(kernel, Case(q, k, heads=(8, 4), window=window)).check()


@each(SINKS[0])
def test_a_sink_of_minus_infinity_is_none(kernel: ForwardKernel) -> None:
    call = Call(kernel, Case(100, 100))
    call.sinks = torch.full((call.heads,), -math.inf, device="cuda")
    call.check()


# ---------------------------------------------------------------------- lengths
PACKED = ((100, 1, 0, 65, 128, 7), (100, 90, 33, 0, 257, 64))


@each(*VARLEN)
def test_packed_sequences(kernel: ForwardKernel) -> None:
    Call(kernel, Case(*PACKED)).check()
    Call(kernel, Case((0, 0, 3), (5, 0, 0), heads=(2, 2))).check()
    Call(kernel, Case(33, (5, 300, 0), heads=(2, 1), batch=3)).check()  # padded queries, packed keys
    Call(kernel, Case((70, 1, 130), 140, heads=(2, 1), batch=3)).check()  # and the other way round


@each(*VARLEN)
def test_a_cache_that_is_not_full(kernel: ForwardKernel) -> None:
    Call(kernel, Case(5, 300, batch=4, used=(300, 1, 0, 129))).check()
    Call(kernel, Case((3, 70), (200, 150), used=(199, 65))).check()


@each(*VARLEN, *VARLEN_SPLIT)
def test_neighbours_do_not_matter(kernel: ForwardKernel) -> None:
    """NaN in the sequences beside one reaches nothing of it, and its bits stay the same."""
    case = Case((40, 65, 30), (70, 131, 90), parts=3)
    call = Call(kernel, case)
    o, lse = call.check()
    for b in (0, 2):
        for x in (call.q_seq.rows(call.q, b), call.k_seq.rows(call.k, b), call.k_seq.rows(call.v, b)):
            x.fill_(math.nan)
    o_alone, lse_alone = call.launch()
    assert torch.equal(call.q_seq.rows(o, 1), call.q_seq.rows(o_alone, 1))
    assert torch.equal(call.q_seq.lse(lse, 1), call.q_seq.lse(lse_alone, 1))


# ---------------------------------------------------------------------- split keys
@each(*SPLIT)
@pytest.mark.parametrize("parts", [1, 2, 5, 33, 0])
def test_split_keys(kernel: ForwardKernel, parts: int) -> None:
    for q, k in ((1, 1000), (70, 300), (200, 129), (3, 0)):
        Call(kernel, Case(q, k, parts=parts)).check()


@each(*VARLEN_SPLIT)
def test_split_cache(kernel: ForwardKernel) -> None:
    Call(kernel, Case(1, 4096, batch=4, heads=(8, 2), used=(4096, 1, 0, 2049))).check()
    Call(kernel, Case(16, 500, batch=3, used=(500, 3, 77), parts=4)).check()
    Call(kernel, Case(*PACKED, parts=3)).check()


@each(SPLIT[0])
def test_the_heads_of_a_group_as_rows(kernel: ForwardKernel) -> None:
    """One query a head: the heads that share keys become the rows of one head, by strides alone."""
    batch, keys, heads_kv, group, d = 2, 3000, 4, 5, 128
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        torch.randn(shape, device="cuda", generator=generator).bfloat16()
        for shape in ((batch, 1, heads_kv * group, d), *[(batch, keys, heads_kv, d)] * 2)
    )
    o, lse = torch.empty_like(q), torch.empty(batch, heads_kv * group, 1, device="cuda")
    partial = torch.empty(8, batch, heads_kv, group, d + 1, device="cuda")
    as_rows = (x.view(batch, heads_kv, group, d).transpose(1, 2) for x in (q, o))
    q_rows, o_rows = as_rows
    features = Features(
        d_head_v=d,
        n_splits=8,
        partial_o=partial.data_ptr(),
        partial_lse=partial.data_ptr() + 4 * 8 * batch * heads_kv * group * d,
    )
    cuda.forward(kernel, q_rows, k, v, o_rows, lse, d**-0.5, features)
    out, expected_lse = reference(q, k, v)
    torch.testing.assert_close(o.double(), out, atol=1.6e-2, rtol=1.6e-2)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=2e-6)


@each(SPLIT[0])
@pytest.mark.parametrize("parts", [0, 257, -1])
def test_an_impossible_number_of_parts_is_refused(kernel: ForwardKernel, parts: int) -> None:
    call = Call(kernel, Case(1, 100, parts=1))
    features = Features(
        d_head_v=128, n_splits=parts, partial_o=call.q.data_ptr(), partial_lse=call.q.data_ptr()
    )
    with pytest.raises(KernelLaunchError):
        cuda.forward(kernel, call.q, call.k, call.v, torch.empty_like(call.q), None, 1.0, features)
    call.check()  # the next call on good arguments is right


# ---------------------------------------------------------------------- pages
@each(*PAGED)
@pytest.mark.parametrize("page", [16, 48, 64, 256, 1000])
def test_pages(kernel: ForwardKernel, page: int) -> None:
    traits = kernel.traits
    features = {"page": page}
    if traits.padded_head:
        features |= {"d": 40, "softcap": 20.0, "window": (100, 5)}
    for parts in (1, 3) if traits.split else (0,):
        case = Case(1, 700, batch=4, heads=(8, 2), used=(700, 1, 0, 449), parts=parts, **features)
        paged, plain = Call(kernel, case), Call(_without_pages(kernel), case)
        for x, y in zip(paged.check(), plain.launch(), strict=True):
            assert torch.equal(x, y), "pages have an influence on the result"
        Call(kernel, Case(70, 300, batch=3, used=(300, 70, 16), parts=parts, **features)).check()


def _without_pages(kernel: ForwardKernel) -> ForwardKernel:
    return dataclasses.replace(kernel, traits=dataclasses.replace(kernel.traits, paged=False))


# ---------------------------------------------------------------------- head sizes
@each(*PADDED)
def test_padded_heads(kernel: ForwardKernel) -> None:
    sizes = {64: (8, 40, 56), 128: (72, 80, 96, 104)}[kernel.config.d_head]
    for d in sizes:
        Call(kernel, Case(200, 150, d=d)).check()
    Call(kernel, Case(65, 130, d=sizes[-1], d_v=sizes[0])).check()
    Call(kernel, Case(65, 130, d=sizes[0], d_v=kernel.config.d_head)).check()


# ---------------------------------------------------------------------- all together
@each(*EVERYTHING)
def test_everything_at_once(kernel: ForwardKernel) -> None:
    d = kernel.config.d_head - 24
    features = {"heads": (4, 2), "softcap": 20.0, "spread": 4.0, "d": d, "d_v": d - 8}
    for window in ((100, 0), (30, 30), (None, 0), (None, None)):
        for parts in (1, 3, 9):
            Call(kernel, Case(*PACKED, window=window, parts=parts, **features)).check()
    Call(kernel, Case(2, 700, batch=3, used=(700, 0, 65), window=(200, 0), **features)).check()
