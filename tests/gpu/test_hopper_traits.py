"""The traits of the Hopper family, each and together, against the float64 reference.

Every tensor lies within NaN, every output is poisoned before the launch and surrounded by a sentinel, and
every call is made twice. What is read or written beyond a sequence shows, and so does an order of sums that
changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from flash_attention.backends import cuda
from flash_attention.backends.cuda import UNBOUNDED, Features
from flash_helpers import build
from flash_helpers.kernel_configs import DType, ForwardKernel, ForwardTraits, choose_hopper_kernel
from flash_helpers.test.utils import ErrorStats, error_stats, reference

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)

FP16, BF16 = DType.FP16, DType.BF16
GUARD = 16  # rows and columns around every tensor
SENTINEL = 777.0
Lengths = int | tuple[int, ...]


def kernel(
    dtype: DType,
    d_head: int,
    seq_len: int,
    traits: str = "",
    d_head_v: int | None = None,
    exact: bool = False,
) -> ForwardKernel:
    """The kernel chosen for so many queries, with the traits that are named."""
    on = ForwardTraits(**dict.fromkeys(traits.split(), True))
    return choose_hopper_kernel(dtype, d_head, on.causal, seq_len, exact, d_head_v=d_head_v, traits=on)[0]


@dataclass(frozen=True)
class Case:
    """What to compute. A tuple of lengths: sequences packed one behind the other.

    Attributes:
        q, k: queries and keys of each sequence.
        batch: sequences, where neither is packed.
        heads: query heads, kv heads.
        used: keys of each sequence that exist; the others are NaN.
        window: (left, right); None: unbounded.
        softcap: 0: none.
        parts: into which the keys are cut.
        d, d_v: columns of q and k, of v and o; 0: the kernel's.
        jump: scores jump by hundreds of powers of two from the last keys to those before.
    """

    q: Lengths
    k: Lengths
    batch: int = 2
    heads: tuple[int, int] = (4, 2)
    used: tuple[int, ...] | None = None
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    parts: int = 1
    d: int = 0
    d_v: int = 0
    jump: bool = False


WINDOWS = (
    Case(777, 777, window=(100, 0)),
    Case(300, 1000, window=(128, 64)),
    Case(1000, 300, window=(37, 5)),  # the first 695 queries see no key
    Case(640, 640, window=(0, 0)),
    Case(1111, 1111, 1, window=(None, 200)),
    Case(2048, 2048, 1, window=(700, None)),
    Case(1024, 1024, 1, (2, 2), window=(600, 0), jump=True),
)
SOFTCAPS = (
    Case(500, 777, softcap=30.0),
    Case(700, 700, softcap=1.5, jump=True),
    Case(300, 300, softcap=5000.0),
)
SINKS = (Case(333, 500), Case(500, 333), Case(1024, 1024, 1, jump=True))
PACKED = (
    Case((300, 1, 0, 129, 64, 700), (300, 500, 70, 129, 0, 700)),
    Case((5,) * 70, tuple(range(70)), heads=(2, 1)),
    Case((1500, 3), (2000, 3), used=(1300, 2)),
)
SPLITS = (
    Case(1, 2000, 3, (8, 2), parts=7),
    Case(60, 333, parts=9),  # more parts than tiles
    Case(300, 1000, 1, parts=3),
)
CACHES = (  # queries in a batch, keys of which only some exist; and packed ones
    Case(1, 1000, 4, (8, 2), used=(1000, 1, 0, 777), parts=5),
    Case(17, 700, 2, used=(3, 650), parts=3),
    Case((1, 60, 3), (900, 60, 1), parts=4),
)
PLAIN = (Case(777, 777), Case(300, 1000, 1), Case(500, 130), Case(1500, 1500, 1, (2, 2), jump=True))


def padded(*sizes: tuple[int, int]) -> tuple[Case, ...]:
    return tuple(Case(333, 500, d=d, d_v=d_v) for d, d_v in sizes)


CASES: list[tuple[ForwardKernel, tuple[Case, ...]]] = [
    (kernel(BF16, 128, 4096, "window"), WINDOWS),
    (kernel(FP16, 128, 512, "causal window"), WINDOWS[:1] + WINDOWS[3:4]),
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
    (
        kernel(BF16, 64, 4096, "window varlen"),
        tuple(replace(case, window=(90, 20)) for case in PACKED),
    ),
    (kernel(BF16, 128, 1, "split"), SPLITS),
    (kernel(FP16, 64, 512, "causal sinks split"), SPLITS),
    (kernel(FP16, 128, 1, "varlen split"), CACHES),
    (kernel(BF16, 64, 512, "causal varlen split"), CACHES),
    (kernel(BF16, 64, 4096, "padded_head"), padded((8, 8), (32, 40))),
    (kernel(FP16, 128, 512, "causal padded_head"), padded((72, 120), (104, 104))),
    (kernel(BF16, 96, 512, "padded_head"), padded((80, 80))),
    (kernel(FP16, 256, 4096, "padded_head"), padded((200, 248))),
    (kernel(BF16, 96, 512), PLAIN),
    (kernel(FP16, 192, 512, "causal"), PLAIN),
    (kernel(BF16, 192, 4096), PLAIN),
    (kernel(BF16, 192, 512, d_head_v=128), PLAIN),
    (kernel(FP16, 192, 4096, "causal", d_head_v=128), PLAIN),
    (
        kernel(BF16, 128, 4096, "window softcap sinks varlen split padded_head"),
        tuple(replace(c, window=(200, 30), softcap=20.0, d=80, d_v=88) for c in (*PACKED, *CACHES)),
    ),
]  # fmt: skip
KERNELS = [kernel for kernel, _ in CASES]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build.build_kernels(KERNELS, [90])


# ---------------------------------------------------------------------- one call
def guarded(shape: tuple[int, ...], dtype: torch.dtype, fill: float) -> tuple[Tensor, Tensor]:
    """A buffer full of ``fill``, and the (batch, rows, heads, columns) in the middle of it."""
    batch, rows, heads, columns = shape
    buffer = torch.full(
        (batch + 2, rows + 2 * GUARD, heads, columns + 2 * GUARD), fill, dtype=dtype, device="cuda"
    )
    return buffer, buffer[1:-1, GUARD : GUARD + rows, :, GUARD : GUARD + columns]


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


class Call:
    """The tensors of a case, and a launch on them."""

    def __init__(self, kernel: ForwardKernel, case: Case) -> None:
        self.kernel, self.case = kernel, case
        config = kernel.config
        self.q_lens = case.q if isinstance(case.q, tuple) else (case.q,) * case.batch
        self.k_lens = case.k if isinstance(case.k, tuple) else (case.k,) * case.batch
        self.used = case.used or self.k_lens
        self.d = case.d or config.d_head
        self.d_v = case.d_v or config.d_head_v
        self.dtype = config.dtype.to_torch_dtype()
        generator = torch.Generator("cuda").manual_seed(sum(self.q_lens) + 7 * sum(self.k_lens) + self.d)

        def normal(lengths: Lengths, heads: int, columns: int, factor: float) -> Tensor:
            batch, rows = (1, sum(lengths)) if isinstance(lengths, tuple) else (case.batch, lengths)
            view = guarded((batch, rows, heads, columns), self.dtype, math.nan)[1]
            return view.copy_(factor * torch.randn(view.shape, device="cuda", generator=generator))

        self.q = normal(case.q, case.heads[0], self.d, 8 if case.jump else 1)
        self.k = normal(case.k, case.heads[1], self.d, 10 if case.jump else 1)
        self.v = normal(case.k, case.heads[1], self.d_v, 1)
        if case.jump:
            self.k[:, -256:] *= 0.001
        for b, used in enumerate(self.used):
            self.keys(self.k, b)[used:] = math.nan
            self.keys(self.v, b)[used:] = math.nan
        # One sink is beyond most scores.
        sinks = torch.linspace(-3, 6, case.heads[0], device="cuda").roll(1)
        self.sinks = sinks if kernel.traits.sinks else None

    def queries(self, x: Tensor, b: int) -> Tensor:
        """(rows, heads, columns) of sequence b in q, o."""
        return _rows(x, b, self.case.q)

    def keys(self, x: Tensor, b: int) -> Tensor:
        """(rows, heads, columns) of sequence b in k, v."""
        return _rows(x, b, self.case.k)

    def lse(self, x: Tensor, b: int) -> Tensor:
        """(heads, rows) of sequence b."""
        first = sum(self.q_lens[:b])
        return x[:, first : first + self.q_lens[b]] if isinstance(self.case.q, tuple) else x[b]

    def features(self, **change: int) -> Features:
        left, right = self.case.window
        if self.kernel.traits.causal:
            right = 0
        return Features(
            d_head_v=self.d_v,
            window_left=UNBOUNDED if left is None else left,
            window_right=UNBOUNDED if right is None else right,
            softcap=self.case.softcap,
            sinks=0 if self.sinks is None else self.sinks.data_ptr(),
            n_splits=self.case.parts,
            **change,
        )

    def launch(self) -> tuple[Tensor, Tensor]:
        """o and lse; what surrounds o is checked."""
        case, n, heads = self.case, len(self.q_lens), self.case.heads[0]
        most_q, most_k = max(self.q_lens), max(self.k_lens)
        packed_q, packed_k = isinstance(case.q, tuple), isinstance(case.k, tuple)
        buffer, o = guarded((*self.q.shape[:3], self.d_v), self.dtype, SENTINEL)
        o.fill_(math.nan)
        shape = (heads, self.q.shape[1]) if packed_q else (n, heads, most_q)
        lse = torch.full(shape, math.nan, device="cuda")
        rows = n * heads * most_q
        partial_o = torch.full((case.parts, rows, self.d_v), math.nan, device="cuda")
        partial_lse = torch.full((case.parts, rows), math.nan, device="cuda")
        cu_q, cu_k = offsets(self.q_lens), offsets(self.k_lens)
        used = torch.tensor(self.used, device="cuda", dtype=torch.int32)
        # The shapes say how many sequences there are and how long the longest is.
        q = self.q[:, :most_q].expand(n, -1, -1, -1) if packed_q else self.q
        k = self.k[:, :most_k].expand(n, -1, -1, -1) if packed_k else self.k
        features = self.features(
            cu_seqlens_q=cu_q.data_ptr() if packed_q else 0,
            cu_seqlens_k=cu_k.data_ptr() if packed_k else 0,
            seqused_k=used.data_ptr() if case.used else 0,
            lse_stride=self.q.shape[1] if packed_q else 0,
            partial_o=partial_o.data_ptr(),
            partial_lse=partial_lse.data_ptr(),
        )
        cuda.forward(self.kernel, q, k, self.v, o, lse, self.d**-0.5, features)
        torch.cuda.synchronize()
        result = o.clone()
        o.fill_(SENTINEL)
        assert (buffer == SENTINEL).all(), f"{case}: written beyond the output"
        return result, lse


def _rows(x: Tensor, b: int, lengths: Lengths) -> Tensor:
    if not isinstance(lengths, tuple):
        return x[b]
    first = sum(lengths[:b])
    return x[0, first : first + lengths[b]]


# ---------------------------------------------------------------------- what it should be
def same_precision(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window, softcap: float, sinks: Tensor | None
) -> Tensor:
    """PyTorch's eager attention in the precision of the inputs: (1, rows, heads, d) as in ``reference``."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (k, v))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = scores.shape[-2:]
    place = torch.arange(rows, device=q.device)[:, None] + keys - rows
    key = torch.arange(keys, device=q.device)
    left, right = window
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device=q.device)
    if left is not None:
        hidden |= key < place - left
    if right is not None or causal:
        hidden |= key > place + (0 if causal else right)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        column = sinks.to(q.dtype)[None, :, None, None].expand(1, -1, rows, 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return (weights @ v).transpose(1, 2).nan_to_num()  # PyTorch's rows without keys are NaN


@cache
def expected(kernel: ForwardKernel, case: Case) -> list[tuple[Tensor, Tensor, ErrorStats]]:
    """Output, LSE and the allowed error of each sequence that has queries."""
    call = Call(kernel, case)
    result = []
    for b, used in enumerate(call.used):
        q = call.queries(call.q, b)[None]
        k, v = (call.keys(x, b)[None, :used] for x in (call.k, call.v))
        how = dict(causal=kernel.traits.causal, window=case.window, softcap=case.softcap, sinks=call.sinks)
        out, lse = reference(q, k, v, **how)
        allowed = error_stats(same_precision(q, k, v, **how), out)
        result.append((out[0], lse[0], allowed))
    return result


@pytest.mark.parametrize(("kernel", "cases"), CASES, ids=[k.short_form() for k in KERNELS])
def test_traits(kernel: ForwardKernel, cases: tuple[Case, ...]) -> None:
    for case in cases:
        call = Call(kernel, case)
        o, lse = call.launch()
        again, lse_again = call.launch()
        assert torch.equal(o, again), f"{case}: two equal calls differ"
        assert torch.equal(lse, lse_again), f"{case}: two equal calls differ in LSE"
        for b, (out, out_lse, allowed) in enumerate(expected(kernel, case)):
            error = error_stats(call.queries(o, b), out)
            at = f"{case}, sequence {b}: {error}, allowed {allowed}"
            assert error.rel_frobenius <= 2 * allowed.rel_frobenius + 1e-6, at
            assert error.max_abs <= 2 * allowed.max_abs + 1e-5, at
            torch.testing.assert_close(
                call.lse(lse, b).double(),
                out_lse,
                atol=1e-3,
                rtol=2e-6,
                msg=lambda text, at=at: f"{at}\n{text}",
            )


# ---------------------------------------------------------------------- NaN
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.traits.varlen], ids=ForwardKernel.short_form)
def test_a_sequence_does_not_feel_its_neighbours(kernel: ForwardKernel) -> None:
    case = Case((70, 100, 250), (200, 333, 300), softcap=20.0, parts=2)
    call = Call(kernel, case)
    alone, lse_alone = call.launch()
    for b in (0, 2):
        for x in (call.queries(call.q, b), call.keys(call.k, b), call.keys(call.v, b)):
            x.fill_(math.nan)
    o, lse = call.launch()
    assert torch.equal(call.queries(o, 1), call.queries(alone, 1))
    assert torch.equal(call.lse(lse, 1), call.lse(lse_alone, 1))
    assert call.queries(o, 0).isnan().all()
    assert call.queries(o, 2).isnan().all()


@pytest.mark.parametrize("trait", ["window", "softcap", "sinks", "split", "padded_head"])
def test_nan_in_a_visible_place_is_shown(trait: str) -> None:
    kernel = next(k for k in KERNELS if getattr(k.traits, trait) and not k.traits.varlen)
    case = Case(200, 400, 1, (2, 2), window=(150, 0), softcap=20.0, parts=3)
    call = Call(kernel, case)
    call.k[0, 299, 0, 3] = math.nan
    call.v[0, 250, 1, 7] = math.nan
    o, lse = call.launch()
    left, right = call.case.window if kernel.traits.window else (None, 0 if kernel.traits.causal else None)
    place = torch.arange(200, device="cuda") + 200
    for key, head in ((299, 0), (250, 1)):
        sees = torch.ones(200, dtype=torch.bool, device="cuda")
        if left is not None:
            sees &= key >= place - left
        if right is not None:
            sees &= key <= place + right
        assert sees.any()
        columns = slice(None) if head == 0 else 7
        assert o[0, sees, head, columns].isnan().all()
    assert lse[0, 1].isfinite().all()


# ---------------------------------------------------------------------- one query of several heads as rows
def test_packed_heads() -> None:
    """One query of a group of heads becomes rows of one head: strides say it all, nothing is copied."""
    kernel = next(k for k in KERNELS if k.traits == ForwardTraits(split=True))
    case = Case(1, 1500, 3, (12, 2), parts=4)
    call = Call(kernel, case)
    expected_o, expected_lse = call.launch()
    group = 6

    def packed(x: Tensor) -> Tensor:
        """(batch, 1, heads, d) as (batch, group, kv heads, d)."""
        batch, _, head, _ = x.stride()
        return x.as_strided(
            (x.shape[0], group, x.shape[2] // group, x.shape[3]), (batch, head, head * group, 1)
        )

    o = torch.full_like(expected_o, math.nan)
    lse = torch.full_like(expected_lse, math.nan)
    partial_o = torch.full((case.parts, o[..., 0].numel(), call.d_v), math.nan, device="cuda")
    partial_lse = torch.full((case.parts, o[..., 0].numel()), math.nan, device="cuda")
    features = call.features(partial_o=partial_o.data_ptr(), partial_lse=partial_lse.data_ptr())
    cuda.forward(kernel, packed(call.q), call.k, call.v, packed(o), lse, call.d**-0.5, features)
    assert torch.equal(o, expected_o)
    assert torch.equal(lse, expected_lse)


# ---------------------------------------------------------------------- streams and graphs
def test_graphs_of_counted_items_run_side_by_side() -> None:
    """Two captured launches that take their items from counters, replayed in two streams at a time."""
    calls = []
    for traits in ("causal varlen", "window"):
        kernel = next(k for k in KERNELS if k.traits.short_form().replace("+", " ") == traits)
        assert kernel.config.dynamic_schedule
        q, k, v = (
            torch.randn(4, 900, 8, kernel.config.d_head, device="cuda").to(
                kernel.config.dtype.to_torch_dtype()
            )
            for _ in range(3)
        )
        features = Features(d_head_v=kernel.config.d_head_v, window_left=100, window_right=0)
        wanted, o = torch.empty_like(q), torch.empty_like(q)
        cuda.forward(kernel, q, k, v, wanted, None, 0.1, features)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cuda.forward(kernel, q, k, v, o, None, 0.1, features)
        calls.append((graph, o, wanted, torch.cuda.Stream(), (q, k, v)))
    for _ in range(20):
        for _, o, _, _, _ in calls:
            o.fill_(math.nan)
        torch.cuda.synchronize()
        for _ in range(3):
            for graph, _, _, stream, _ in calls:
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for _, o, wanted, _, _ in calls:
            assert torch.equal(o, wanted)
