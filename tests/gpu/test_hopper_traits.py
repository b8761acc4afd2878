"""The traits of the Hopper family, each and together, against the float64 reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from trait_calls import Call, Case

from flash_attention.backends import cuda
from flash_attention.backends.cuda import Features
from flash_helpers import build
from flash_helpers.kernel_configs import DType, ForwardKernel, ForwardTraits, choose_hopper_kernel

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)

FP16, BF16 = DType.FP16, DType.BF16


def kernel(
    dtype: DType,
    d_head: int,
    seq_len: int,
    traits: str = "",
    *,
    d_head_v: int | None = None,
    exact: bool = False,
) -> ForwardKernel:
    """The kernel chosen for so many queries, with the traits that are named."""
    on = ForwardTraits(**dict.fromkeys(traits.split(), True))
    return choose_hopper_kernel(
        dtype, d_head, on.causal, seq_len, exact, d_head_v=d_head_v, traits=on
    )[0]  # fmt: skip


WINDOWS = (
    Case(777, 777, 1, window=(100, 0)),
    Case(300, 1000, 1, window=(128, 64)),
    Case(1000, 300, 1, window=(37, 5)),  # the first 695 queries see no key
    Case(320, 320, 1, window=(0, 0)),
    Case(700, 700, 1, (2, 2), window=(None, 200)),
    Case(1300, 1300, 1, (2, 2), window=(700, None)),
    Case(800, 800, 1, (2, 2), window=(500, 0), jump=True),
)
SOFTCAPS = (
    Case(500, 777, softcap=30.0, spread=8.0),
    Case(700, 700, 1, softcap=1.5, jump=True),
    Case(300, 300, softcap=5000.0, spread=3.0),
)
SINKS = (Case(333, 500), Case(500, 333), Case(3, 0), Case(900, 900, 1, jump=True))
PACKED = (
    Case((300, 1, 0, 129, 64, 400), (300, 500, 70, 129, 0, 700)),
    Case((5,) * 70, tuple(range(70)), heads=(2, 1)),  # more sequences than a warp has lanes
    Case((800, 3), (1500, 3), used=(1300, 2)),
    Case((0, 0, 3), (5, 0, 0)),
    Case((1, 1, 1, 1), (300, 1, 130, 64)),  # the longest has one query, the tensor more
    Case((3, 1), (1, 1)),
    Case(33, (5, 300, 0), batch=3),  # padded queries, packed keys
    Case((70, 1, 130), 140, batch=3),  # the other way round
    Case(5, 300, batch=4, used=(300, 1, 0, 129)),
)
SPLITS = (
    Case(1, 2000, 3, (8, 2), parts=7),
    Case(60, 333, parts=9),  # more parts than tiles
    Case(300, 1000, 1, parts=3),
    Case(3, 0, parts=2),
    Case(1, 4096, 1, (2, 2)),
)
CACHES = (
    Case(1, 1000, 4, (8, 2), used=(1000, 1, 0, 777), parts=5),
    Case(17, 700, 2, used=(3, 650), parts=3),
    Case((1, 60, 3), (900, 60, 1), parts=4),
)
PLAIN = (Case(777, 777, 1), Case(300, 1000, 1), Case(500, 130), Case(900, 900, 1, (2, 2), jump=True))
EVERYTHING = tuple(
    replace(case, window=window, softcap=20.0, spread=4.0, d=80, d_v=88)
    for case, window in zip(
        (*PACKED, *CACHES), ((100, 0), (30, 30), (None, 5), (200, None)) * 3, strict=False
    )
)


PAGED = tuple(
    replace(case, page=page)
    for page in (16, 48, 64, 80, 128, 512)
    for case in (
        Case(1, 700, batch=4, heads=(8, 2), used=(700, 1, 0, 449), parts=3),
        Case(70, 1300, batch=3, used=(1300, 70, 16), parts=2),
    )
)


def padded(*sizes: tuple[int, int]) -> tuple[Case, ...]:
    """The same lengths with columns of (q and k, v and o)."""
    return tuple(Case(333, 500, d=d, d_v=d_v) for d, d_v in sizes)


CASES: tuple[tuple[ForwardKernel, tuple[Case, ...]], ...] = (
    (kernel(BF16, 128, 4096, "window"), WINDOWS),
    (kernel(FP16, 128, 512, "causal window"), (WINDOWS[0], WINDOWS[3])),
    (kernel(FP16, 64, 4096, "window"), WINDOWS),
    (kernel(BF16, 64, 512, "window", exact=True), WINDOWS),
    (kernel(BF16, 256, 4096, "window"), WINDOWS),
    (kernel(BF16, 128, 4096, "softcap"), SOFTCAPS),
    (kernel(FP16, 64, 512, "causal softcap", exact=True), SOFTCAPS),
    (kernel(BF16, 128, 512, "causal sinks"), SINKS),
    (kernel(FP16, 64, 4096, "sinks"), SINKS),
    (kernel(BF16, 128, 4096, "causal varlen"), PACKED),
    (kernel(FP16, 128, 512, "varlen"), PACKED),
    (kernel(FP16, 64, 512, "causal varlen"), PACKED),
    (kernel(BF16, 256, 512, "varlen sinks"), PACKED),
    (kernel(BF16, 64, 4096, "window varlen"), tuple(replace(case, window=(90, 20)) for case in PACKED)),
    (kernel(BF16, 128, 1, "split"), SPLITS),
    (kernel(FP16, 64, 512, "causal sinks split"), SPLITS),
    (kernel(FP16, 128, 1, "varlen split"), CACHES),
    (kernel(BF16, 64, 512, "causal varlen split"), CACHES),
    (kernel(BF16, 128, 1, "varlen split paged"), PAGED),
    (kernel(FP16, 64, 512, "causal varlen paged"), PAGED),
    (kernel(BF16, 256, 512, "varlen paged"), PAGED),
    (kernel(FP16, 128, 4096, "causal varlen split paged"), PAGED),
    (kernel(BF16, 192, 4096, "causal varlen paged"), PAGED),  # tiles of 112 keys
    (kernel(BF16, 64, 4096, "padded_head"), padded((8, 8), (32, 40), (64, 56))),
    (kernel(FP16, 128, 512, "causal padded_head"), padded((72, 120), (104, 104))),
    (kernel(BF16, 96, 512, "padded_head"), padded((80, 80))),
    (kernel(FP16, 256, 4096, "padded_head"), padded((200, 248))),
    (kernel(BF16, 96, 512), PLAIN),
    (kernel(FP16, 192, 512, "causal"), PLAIN),
    (kernel(BF16, 192, 4096), PLAIN),
    (kernel(BF16, 192, 512, d_head_v=128), PLAIN),
    (kernel(FP16, 192, 4096, "causal", d_head_v=128), PLAIN),
    (kernel(BF16, 128, 4096, "window softcap sinks varlen split padded_head"), EVERYTHING),
)
KERNELS = [kernel for kernel, _ in CASES]
PACKED_KERNELS = [k for k in KERNELS if k.traits.varlen and not k.traits.paged]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build.build_kernels(KERNELS, [90])


@pytest.mark.parametrize(("kernel", "cases"), CASES, ids=[kernel.short_form() for kernel in KERNELS])
def test_traits(kernel: ForwardKernel, cases: tuple[Case, ...]) -> None:
    for case in cases:
        Call(kernel, case).check()


def with_trait(trait: str) -> ForwardKernel:
    """A kernel with the trait and without varlen."""
    return next(k for k in KERNELS if getattr(k.traits, trait) and not k.traits.varlen)


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.traits.paged], ids=ForwardKernel.short_form)
@pytest.mark.parametrize("page", [16, 32, 48, 64, 80, 128, 256])
def test_pages_have_no_influence_on_the_bits(kernel: ForwardKernel, page: int) -> None:
    case = Case(5, 900, batch=3, heads=(4, 2), used=(900, 33, 400), parts=2, page=page)
    without = replace(kernel, traits=replace(kernel.traits, paged=False))
    for paged, plain in zip(Call(kernel, case).launch(), Call(without, case).launch(), strict=True):
        assert torch.equal(paged, plain)


# ---------------------------------------------------------------------- NaN
@pytest.mark.parametrize(
    "kernel", [k for k in KERNELS if k.traits.varlen and not k.traits.paged], ids=ForwardKernel.short_form
)
def test_a_sequence_does_not_feel_its_neighbours(kernel: ForwardKernel) -> None:
    """Not in a bit: tiles that run past a sequence's end hold zeros there, whatever the next one is."""
    call = Call(kernel, Case((70, 100, 250), (200, 333, 300), softcap=20.0, parts=2))
    o, lse = call.launch()
    for b in (0, 2):
        for x in (call.q_seq.rows(call.q, b), call.k_seq.rows(call.k, b), call.k_seq.rows(call.v, b)):
            x.fill_(math.nan)
    o_alone, lse_alone = call.launch()
    assert torch.equal(call.q_seq.rows(o, 1), call.q_seq.rows(o_alone, 1))
    assert torch.equal(call.q_seq.lse(lse, 1), call.q_seq.lse(lse_alone, 1))
    assert call.q_seq.rows(o_alone, 0).isnan().all()
    assert call.q_seq.rows(o_alone, 2).isnan().all()


@pytest.mark.parametrize("trait", ["window", "softcap", "sinks", "split", "padded_head"])
def test_nan_in_a_visible_place_is_shown(trait: str) -> None:
    kernel = with_trait(trait)
    call = Call(kernel, Case(200, 400, 1, (2, 2), window=(150, 0), softcap=20.0, parts=3))
    call.k[0, 299, 0, 3] = math.nan
    call.v[0, 250, 1, 7] = math.nan
    o, lse = call.launch()
    place = torch.arange(200, device="cuda") + 200
    for key, head in ((299, 0), (250, 1)):
        sees = torch.ones(200, dtype=torch.bool, device="cuda")
        if kernel.traits.window or kernel.traits.causal:
            sees &= key <= place
        if kernel.traits.window:
            sees &= key >= place - 150
        assert sees.any()
        assert o[0, sees, head, slice(None) if head == 0 else 7].isnan().all()
        if head == 0:
            assert lse[0, 0, sees].isnan().all()
    assert lse[0, 1].isfinite().all()


# ---------------------------------------------------------------------- layouts
def test_the_heads_of_a_group_as_rows() -> None:
    """One query a head: the heads that share keys become the rows of one head, by strides alone."""
    call = Call(with_trait("split"), Case(1, 1500, 3, (12, 2), parts=4))
    expected, expected_lse = call.check()
    group, rows = 6, (4, 3, 2, 6)  # parts, batch, kv heads, rows

    def as_rows(x: Tensor) -> Tensor:
        """(batch, 1, heads, d) as (batch, group, kv heads, d)."""
        batch, _, head, _ = x.stride()
        shape = (x.shape[0], group, x.shape[2] // group, x.shape[3])
        return x.as_strided(shape, (batch, head, head * group, 1))

    o, lse = torch.full_like(expected, math.nan), torch.full_like(expected_lse, math.nan)
    partial_o = torch.full((*rows, call.d_v), math.nan, device="cuda")
    partial_lse = torch.full(rows, math.nan, device="cuda")
    features = Features(
        call.d_v, n_splits=4, partial_o=partial_o.data_ptr(), partial_lse=partial_lse.data_ptr()
    )
    cuda.forward(call.kernel, as_rows(call.q), call.k, call.v, as_rows(o), lse, call.d**-0.5, features)
    assert torch.equal(o, expected)
    assert torch.equal(lse, expected_lse)


# ---------------------------------------------------------------------- streams and graphs
def test_graphs_of_counted_items_run_side_by_side() -> None:
    """Two captured launches that take their items from counters, replayed in two streams at a time."""
    launches = []
    for kernel in (with_trait("window"), next(k for k in KERNELS if k.traits.varlen)):
        config = kernel.config
        assert config.dynamic_schedule
        q, k, v = (
            torch.randn(4, 900, 8, config.d_head, device="cuda").to(config.dtype.to_torch_dtype())
            for _ in range(3)
        )
        features = Features(d_head_v=config.d_head_v, window_left=100, window_right=0)
        expected, o = torch.empty_like(q), torch.empty_like(q)
        cuda.forward(kernel, q, k, v, expected, None, 0.1, features)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cuda.forward(kernel, q, k, v, o, None, 0.1, features)
        launches.append((graph, torch.cuda.Stream(), o, expected, (q, k, v)))
    for _ in range(20):
        for _, _, o, _, _ in launches:
            o.fill_(math.nan)
        torch.cuda.synchronize()
        for _ in range(3):
            for graph, stream, _, _, _ in launches:
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for _, _, o, expected, _ in launches:
            assert torch.equal(o, expected)
