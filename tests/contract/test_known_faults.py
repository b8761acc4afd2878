"""Faults that attention kernels are known for, each as a small input with its right answer.

All of them run in both element types, by the kernel that the library chooses (``chosen``) and by one that
small problems suit (``plain``); on a GPU by what each family chooses for longer problems, too, which on the
CPU are the same computation. Right answers are exact, from the float64 reference, or were computed by hand.
"""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from contract_kernels import family_configs, plain_config
from torch import Tensor

from flash_attention import attention, attention_varlen, last_kernel
from flash_attention.cached import attention_cached
from flash_helpers import build
from flash_helpers.kernel_configs import DType
from flash_helpers.kernels.kernel import ForwardConfig
from flash_helpers.test.utils import ramp, reference

WAYS = {"cpu": ("chosen", "plain"), "cuda": ("chosen", "plain", "ampere", "hopper")}
LSE_TOLERANCE = {"atol": 1e-3, "rtol": 2e-6}


@dataclass(frozen=True)
class Way:
    """An element type, a device, and who names the configuration (one of its ``WAYS``)."""

    name: str
    dtype: DType
    device: str

    @property
    def kind(self) -> torch.dtype:
        return self.dtype.to_torch_dtype()

    @property
    def tolerance(self) -> dict[str, float]:
        tolerance = 2e-3 if self.dtype is DType.FP16 else 1.6e-2
        return {"atol": tolerance, "rtol": tolerance}

    def config(self, causal: bool, d_head: int = 64) -> ForwardConfig | None:
        if self.name == "chosen":
            return None
        if self.name == "plain":
            return plain_config(self.dtype, d_head)
        return family_configs(self.dtype, causal)[self.name]

    def full(self, shape: tuple[int, ...], value: float) -> Tensor:
        return torch.full(shape, value, dtype=self.kind, device=self.device)

    def rows(self, values: list[float], d_head: int = 64) -> Tensor:
        """(1, len(values), 1, d_head), a value a row."""
        row = torch.tensor(values, device=self.device).to(self.kind)
        return row[None, :, None, None].expand(1, -1, 1, d_head).contiguous()

    def ramp(self, shape: tuple[int, ...], factor: int) -> Tensor:
        return ramp(shape, factor, self.kind, self.device)

    def ramps(self, q_shape: tuple[int, ...], kv_shape: tuple[int, ...]) -> list[Tensor]:
        """q, k and v."""
        return [self.ramp(s, a) for s, a in ((q_shape, 5), (kv_shape, 7), (kv_shape, 11))]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, d_head: int = 64, **options
    ) -> tuple[Tensor, Tensor]:
        """Output and LSE. Without the LSE another kernel may be chosen: its output is as right.

        On the CPU that is the output that is returned: PyTorch's own attention has no LSE.
        """
        options |= {"causal": causal, "config": self.config(causal, d_head)}
        o, lse = attention(q, k, v, return_lse=True, **options)
        if self.name == "chosen":
            again = attention(q, k, v, **(options | {"out": None}))
            torch.testing.assert_close(again, o, **self.tolerance)
            if self.device == "cpu" and options.get("out") is None:
                return again, lse
        return o, lse

    def check(self, q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
        """Output and LSE, after a comparison with the reference."""
        o, lse = self.attend(q, k, v, **options)
        self.compare(o, lse, q, k, v, options.get("causal", False))
        return o, lse

    def compare(self, o: Tensor, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
        expected, expected_lse = reference(q, k, v, causal=causal)
        torch.testing.assert_close(o.double(), expected, **self.tolerance)
        if lse is not None:
            torch.testing.assert_close(lse.double(), expected_lse, **LSE_TOLERANCE)

    def check_layout(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
        """``check``, and equal bits by the same kernel from contiguous copies."""
        o, lse = self.check(q, k, v, causal=causal)
        attention(q, k, v, causal=causal, config=self.config(causal), return_lse=True)
        kernel = last_kernel()
        copies = [x.contiguous() for x in (q, k, v)]
        again, lse_again = attention(*copies, causal=causal, config=kernel.config, return_lse=True)
        if self.device == "cpu" and self.name == "chosen":
            again = attention(*copies, causal=causal)
        if last_kernel() == kernel:  # else the keys of one of the calls are cut into parts
            assert torch.equal(o, again)
            assert torch.equal(lse, lse_again)
        else:
            assert self.name == "chosen"
            torch.testing.assert_close(o, again, **self.tolerance)
        return o, lse


@pytest.fixture(params=list(DType), ids=lambda dtype: dtype.name)
def dtype(request: pytest.FixtureRequest) -> DType:
    return request.param


def ways(*names: str) -> list[object]:
    """Parameters of ``way``: all, or those of the names."""
    return [
        pytest.param((device, name), id=f"{device}-{name}", marks=[pytest.mark.gpu] * (device == "cuda"))
        for device, known in WAYS.items()
        for name in known
        if not names or name in names
    ]


@pytest.fixture(params=ways())
def way(request: pytest.FixtureRequest, dtype: DType) -> Way:
    device, name = request.param
    if name == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper family needs sm_90")
    return Way(name, dtype, device)


# Of head sizes that the families' configurations do not take.
any_head_size = pytest.mark.parametrize("way", ways("chosen", "plain"), indirect=True)
each_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


# ---------------------------------------------------------------------- offsets and grids
@each_mask
def test_rows_further_apart_than_32_bits(way: Way, causal: bool) -> None:
    """A batch stride of 2^31 elements in 4 GiB, of which 24,576 elements are live."""
    base = torch.empty(2**31 + 16384, dtype=way.kind, device=way.device)
    shape = (2, 64, 1, 64)
    q, k, v = (base[o:].as_strided(shape, (2**31, 64, 64, 1)) for o in (0, 4096, 8192))
    for x, factor in zip((q, k, v), (5, 7, 11), strict=True):
        x.copy_(way.ramp(shape, factor))
    way.check_layout(q, k, v, causal)


@any_head_size
def test_views_of_a_long_fused_projection(way: Way) -> None:
    """Row 99,864 begins 2^31 elements behind the first. On the CPU, of two heads."""
    rows, heads, d_head = 100_000, 56, 128
    base = torch.empty(1, rows, 3, heads, d_head, dtype=way.kind, device=way.device)
    step = 1 if way.device == "cuda" else heads - 1
    q, k, v = (x[:, :, ::step] for x in base.unbind(2))
    k, v = k[:, -64:], v[:, -64:]
    for x, factor in zip((q, k, v), (5, 7, 11), strict=True):
        x.copy_(
            way.ramp((1, 64, *x.shape[2:]), factor).repeat(1, -(-x.shape[1] // 64), 1, 1)[:, : x.shape[1]]
        )
    o = attention(q, k, v, config=way.config(False, d_head))
    way.compare(o[:, :64], None, q[:, :64], k, v, False)
    assert torch.equal(o[:, 64:99_968], o[:, :64].repeat(1, 1561, 1, 1))
    assert torch.equal(o[:, 99_968:], o[:, :32])


@pytest.mark.parametrize("shape", [(65536, 16, 1, 64), (1, 16, 65536, 64), (13108, 32, 5, 64)], ids=str)
@each_mask
def test_more_items_than_a_dimension_of_a_grid(way: Way, shape: tuple[int, ...], causal: bool) -> None:
    """Item i has values of 2^(i mod 5 - 2): no two that differ by 65,536 are alike."""
    if way.device == "cpu" and (causal or way.name != "chosen"):
        pytest.skip("grids are a GPU's: once is enough")
    batch, seq_len, heads, d_head = shape
    one = (1, seq_len, 1, d_head)
    q, k, v = (x.expand(shape).contiguous() for x in way.ramps(one, one))
    item = torch.arange(batch * heads, device=way.device).view(batch, 1, heads, 1)
    factor = torch.exp2(item % 5 - 2.0).to(way.kind)
    v *= factor
    o = way.full(shape, math.nan)
    attention(q, k, v, causal=causal, config=way.config(causal), out=o)
    first, last = (slice(0, 1), slice(None), slice(0, 1)), (slice(-1, None), slice(None), slice(-1, None))
    for place in (first, last):
        way.compare(o[place], None, q[place], k[place], v[place], causal)
    # Powers of 2 change no bit but those of the smallest numbers. Some rows of each item are enough.
    torch.testing.assert_close(o[:, ::5], o[first][:, ::5] * 4 * factor, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "seq_len", [pytest.param(1 << 16, id="cpu-size"), pytest.param(8_388_609, marks=pytest.mark.gpu)]
)
def test_more_query_blocks_than_a_dimension_of_a_grid(way: Way, seq_len: int) -> None:
    if way.device == "cpu" and seq_len > 1 << 20:
        pytest.skip("takes a GPU")
    q, v = way.full((1, seq_len, 1, 64), 0.0), way.ramp((1, 1, 1, 64), 11)
    o = way.full(q.shape, math.nan)
    attention(q, v, v, config=way.config(False), out=o)
    assert (o == v).all()


@pytest.mark.parametrize(
    "sequences", [pytest.param(1000, id="cpu-size"), pytest.param(80_000, marks=pytest.mark.gpu)]
)
def test_more_packed_sequences_than_a_dimension_of_a_grid(device: str, sequences: int) -> None:
    """Sequence i has i mod 3 + 1 rows of value i mod 5."""
    if device == "cpu" and sequences > 1000:
        pytest.skip("takes a GPU")
    which = torch.arange(sequences, device=device)
    lengths = which % 3 + 1
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    v = (which % 5).repeat_interleave(lengths)[:, None, None].half().expand(-1, 1, 64).contiguous()
    q = torch.zeros_like(v)
    o = torch.full_like(v, math.nan)
    attention_varlen(q, q.clone(), v, offsets, offsets, 3, 3, causal=True, out=o)
    assert torch.equal(o, v)


# ---------------------------------------------------------------------- masks and the LSE
def test_a_causal_mask_is_aligned_with_the_last_key(way: Way) -> None:
    def means(seq_len_q: int, values: list[float]) -> tuple[Tensor, Tensor]:
        k = way.rows([0.0] * len(values))
        o, lse = way.check(
            k[:, :1].expand(1, seq_len_q, 1, 64).contiguous(), k, way.rows(values), causal=True
        )
        return o[0, :, 0].float(), lse[0, 0]

    o, lse = means(3, [j + 1.0 for j in range(7)])
    assert o[:, 0].tolist() == [3.0, 3.5, 4.0]
    assert lse.tolist() == pytest.approx([math.log(n) for n in (5, 6, 7)], abs=1e-5)
    o, lse = means(7, [1.0, 2.0, 3.0])
    assert o[:, 0].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 1.5, 2.0]
    assert lse.tolist() == pytest.approx([-math.inf] * 4 + [0.0, math.log(2), math.log(3)], abs=1e-5)
    o, lse = means(129, [j % 16 + 1.0 for j in range(300)])
    torch.testing.assert_close(o[0], torch.full_like(o[0], 8.360465), **way.tolerance)
    torch.testing.assert_close(o[-1], torch.full_like(o[-1], 8.42), **way.tolerance)
    assert lse[0].item() == pytest.approx(5.147494, abs=1e-5)
    o, _ = means(1, [j % 16 + 1.0 for j in range(4096)])
    assert (o == 8.5).all()


def merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Results over parts of the keys, combined by their LSEs."""
    lses = torch.stack([lse for _, lse in parts])
    lse = torch.logsumexp(lses, 0)
    weights = (lses - lse).exp().transpose(2, 3)[..., None]
    return sum(o.float() * w for (o, _), w in zip(parts, weights, strict=True)), lse


def test_the_lse_is_natural_and_scaled(way: Way) -> None:
    ones = way.full((1, 7, 1, 64), 1.0)
    _, lse = way.attend(ones[:, :1], ones, ones)
    assert lse.item() == pytest.approx(9.945910, abs=1e-5)


@each_mask
def test_parts_merge_by_their_lses(way: Way, causal: bool) -> None:
    """Under the mask, queries see all of the first part, and so many of the second as of all keys."""
    q, k, v = way.ramps((1, 40, 2, 64), (1, 300, 2, 64))
    o, lse = way.attend(q, k, v, causal=causal)
    parts = [way.attend(q, k[:, :128], v[:, :128]), way.attend(q, k[:, 128:], v[:, 128:], causal=causal)]
    together, lse_together = merged(parts)
    torch.testing.assert_close(lse_together, lse, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(together, o.float(), **way.tolerance)


def test_a_part_without_keys_changes_nothing(way: Way) -> None:
    q, k, v = way.ramps((1, 7, 2, 64), (1, 70, 2, 64))
    whole = way.attend(q, k, v)
    few = way.attend(q, k[:, :3], v[:, :3], causal=True)
    assert (few[1][:, :, :4] == -math.inf).all()
    for part in (few, way.attend(q, k[:, :0], v[:, :0])):
        together, lse = merged([whole, part])
        assert torch.equal(together[:, :4], whole[0][:, :4].float())
        assert torch.equal(lse[:, :, :4], whole[1][:, :, :4])
        assert together.isfinite().all()
        assert lse.isfinite().all()


# ---------------------------------------------------------------------- scores
@pytest.mark.parametrize("seq_len_q", [1, 129])
def test_no_finite_number_stands_for_infinity(way: Way, seq_len_q: int) -> None:
    q = way.full((1, seq_len_q, 1, 64), 32.0)
    for k, out, expected_lse in (
        ([-32.0] * 4, 2.5, -8190.6137), ([-32.0] * 3 + [-31.75], 4.0, -8128.0), ([-32.0], 1.0, -8192.0)
    ):  # fmt: skip
        o, lse = way.attend(q, way.rows(k), way.rows([j + 1.0 for j in range(len(k))]))
        # The product of scale and maximum is rounded, but for powers of 2; then the largest P is only near 1,
        # and rounding it to 16 bits shows.
        step = 0.0 if k[-1] == -32.0 else out * 2.0**-11
        torch.testing.assert_close(o, torch.full_like(o, out), atol=step, rtol=0)
        torch.testing.assert_close(lse, torch.full_like(lse, expected_lse), **LSE_TOLERANCE)


@pytest.mark.parametrize("n_keys", [1, 33, 65, 127, 129])
@each_mask
def test_keys_past_the_end_have_no_weight(way: Way, n_keys: int, causal: bool) -> None:
    """All scores are -20: a key that counts with 0 takes all."""
    q = way.full((1, 5, 1, 64), 1.0)
    o, lse = way.attend(q, way.rows([-2.5] * n_keys), way.rows([1.0] * n_keys), causal=causal)
    seen = [n_keys - 4 + i if causal else n_keys for i in range(5)]
    assert o[0, :, 0, 0].tolist() == [float(n > 0) for n in seen]
    assert (o == o[..., :1]).all()
    expected = [math.log(n) - 20 if n > 0 else -math.inf for n in seen]
    assert lse[0, 0].tolist() == pytest.approx(expected, abs=1e-4)


# ---------------------------------------------------------------------- memory around the tensors
def stain_shared_memory(way: Way) -> None:
    """Leaves NaN in the shared memory of every multiprocessor."""
    if way.device == "cuda":
        x = way.full((8, 512, 16, 64), math.nan)
        for causal in (False, True):
            attention(x, x, x, causal=causal, config=way.config(causal))


def check_guarded(way: Way, views: list[Tensor], around_out: Tensor, out: Tensor, causal: bool) -> None:
    """Inputs lie in NaN, the output in 77."""
    q, k, v = views
    stain_shared_memory(way)
    results = []
    for _ in range(2):  # on a GPU the second call takes the way of remembered ones
        out.fill_(math.nan)
        attention(q, k, v, causal=causal, config=way.config(causal), out=out)
        results.append(out.clone())
    way.compare(out, None, q, k, v, causal)
    assert torch.equal(*results)
    out.fill_(77.0)
    assert (around_out == 77).all()


@pytest.mark.parametrize("seq_len_k", [1, 11, 63, 65, 129, 509])
@pytest.mark.parametrize("seq_len_q", [1, 11, 997])
@each_mask
def test_nan_around_the_rows(way: Way, seq_len_q: int, seq_len_k: int, causal: bool) -> None:
    def guarded(rows: int, value: float) -> tuple[Tensor, Tensor]:
        around = way.full((2, rows + 256, 2, 64), value)
        return around, around[:, 128 : 128 + rows]

    views = [guarded(rows, math.nan)[1] for rows in (seq_len_q, seq_len_k, seq_len_k)]
    for x, factor in zip(views, (5, 7, 11), strict=True):
        x.copy_(way.ramp(tuple(x.shape), factor))
    check_guarded(way, views, *guarded(seq_len_q, 77.0), causal)


@pytest.mark.parametrize("d_head", [8, 16, 24, 40, 64])
@each_mask
def test_nan_beside_the_columns(way: Way, d_head: int, causal: bool) -> None:
    def guarded(rows: int, value: float) -> tuple[Tensor, Tensor]:
        around = way.full((2, rows, 2, d_head + 24), value)
        return around, around[..., 8 : 8 + d_head]

    views = [guarded(rows, math.nan)[1] for rows in (70, 90, 90)]
    for x, factor in zip(views, (5, 7, 11), strict=True):
        x.copy_(way.ramp(tuple(x.shape), factor))
    check_guarded(way, views, *guarded(70, 77.0), causal)


# ---------------------------------------------------------------------- layouts
@each_mask
def test_each_tensor_has_strides_of_its_own(way: Way, causal: bool) -> None:
    shape = (2, 64, 2, 64)
    q, k, v = way.ramps(shape, shape)
    every_second = {factor: way.ramp((2, 128, 2, 64), factor)[:, ::2] for factor in (7, 11)}
    o, lse = way.check_layout(q, every_second[7], v, causal)
    if not causal:
        found = [o[0, 0, 0, 0].item(), o[0, 63, 1, 63].item()]
        assert found == pytest.approx([0.048275, -0.306000], abs=way.tolerance["atol"])
        assert [lse[0, 0, 0].item(), lse[0, 1, 63].item()] == pytest.approx([6.361428, 7.203187], abs=1e-3)
    way.check_layout(q, k, every_second[11], causal)
    for which in range(3):
        mixed = [q, k, v]
        mixed[which] = mixed[which].transpose(1, 2).contiguous().transpose(1, 2)
        way.check_layout(*mixed, causal)
    way.check_layout(*torch.stack((q, k, v), dim=2).unbind(2), causal)


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
@each_mask
def test_addresses_that_are_not_aligned(way: Way, offset: int, causal: bool) -> None:
    shape = (2, 96, 3, 64)
    n = math.prod(shape)
    views = [way.full((n + 16,), 0.0)[offset : offset + n].view(shape) for _ in range(3)]
    for x, factor in zip(views, (5, 7, 11), strict=True):
        x.copy_(way.ramp(shape, factor))
    way.check_layout(*views, causal)
    q, k, v = way.ramps(shape, shape)
    way.check_layout(q, way.full((2, 96, 3, 68), 0.0)[..., :64].copy_(k), v, causal)


@pytest.mark.parametrize("d_head", [72, 80, 96, 104, 128, 192, 256])
def test_nan_beside_the_columns_of_large_heads(device: str, d_head: int) -> None:
    """On a GPU in one type and without a mask, since each head size has kernels of its own to compile."""
    cases = itertools.product(DType, (False, True)) if device == "cpu" else [(DType.FP16, False)]
    for dtype, causal in cases:
        way = Way("chosen", dtype, device)
        views = [way.full((2, rows, 2, d_head + 24), math.nan)[..., 8 : 8 + d_head] for rows in (20, 30, 30)]
        for x, factor in zip(views, (5, 7, 11), strict=True):
            x.copy_(way.ramp(tuple(x.shape), factor))
        around = way.full((2, 20, 2, d_head + 24), 77.0)
        out = around[..., 8 : 8 + d_head]
        _, lse = attention(*views, causal=causal, out=out, return_lse=True)
        way.compare(out, lse, *views, causal)
        out.fill_(77.0)
        assert (around == 77).all()


def in_nan(x: Tensor) -> Tensor:
    """The same rows within larger ones, in a larger buffer."""
    around = x.new_full((x.shape[0] + 64, *x.shape[1:-1], x.shape[-1] + 24), math.nan)
    return around[32 : 32 + x.shape[0], ..., 8 : 8 + x.shape[-1]].copy_(x)


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def misaligned(x: Tensor) -> Tensor:
    return x.new_zeros(x.numel() + 16)[3 : 3 + x.numel()].view(x.shape).copy_(x)


PLACES = {"in NaN": in_nan, "heads first": heads_first, "misaligned": misaligned}
each_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())


@each_place
@each_mask
def test_packed_sequences_in_any_place(device: str, place: Callable[[Tensor], Tensor], causal: bool) -> None:
    lengths_q, lengths_k = (5, 0, 64, 1, 33, 7), (9, 7, 40, 0, 300, 3)
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    way = Way("chosen", DType.FP16, device)
    q, k, v = (place(x) for x in way.ramps((total_q, 4, 64), (total_k, 2, 64)))
    ends = [
        torch.tensor([0, *np.cumsum(n)], dtype=torch.int32, device=device) for n in (lengths_q, lengths_k)
    ]
    o, lse = attention_varlen(q, k, v, *ends, 64, 300, causal=causal, return_lse=True)
    sequences = zip(
        *(x.split(lengths_q) for x in (o, lse.mT, q)), *(x.split(lengths_k) for x in (k, v)), strict=True
    )
    for o_one, lse_one, *qkv in sequences:
        way.compare(o_one[None], lse_one.mT[None], *(x[None] for x in qkv), causal)


@each_place
@each_mask
def test_a_cache_in_any_place(device: str, place: Callable[[Tensor], Tensor], causal: bool) -> None:
    """NaN behind the last key of each item."""
    way, used = Way("chosen", DType.FP16, device), [70, 0, 33]
    q, k, v = (place(x) for x in way.ramps((3, 2, 4, 64), (3, 70, 2, 64)))
    for item, n in enumerate(used):
        k[item, n:] = v[item, n:] = math.nan
    counts = torch.tensor(used, dtype=torch.int32, device=device)
    o, lse = attention_cached(q, k, v, counts, causal=causal, return_lse=True)
    for item, n in enumerate(used):
        one = slice(item, item + 1)
        way.compare(o[one], lse[one], q[one], k[one, :n], v[one, :n], causal)


# ---------------------------------------------------------------------- head sizes and heads
def four_keys(way: Way, d_head: int, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """q = 1, k[j] = j * step, v[j] = j."""
    k, v = (way.rows([j * s for j in range(4)], d_head) for s in (step, 1.0))
    return way.full((1, 1, 1, d_head), 1.0), k, v


@any_head_size
@pytest.mark.parametrize(("d_head", "expected"), [(40, 2.346685), (72, 2.528733)])
def test_the_scale_is_that_of_the_callers_head_size(way: Way, d_head: int, expected: float) -> None:
    o, _ = way.attend(*four_keys(way, d_head, 1 / 8), d_head=128 if d_head > 64 else 64)
    torch.testing.assert_close(o, torch.full_like(o, expected), **way.tolerance)


@any_head_size
def test_the_upper_half_of_the_columns_counts(way: Way) -> None:
    q, k, v = four_keys(way, 128, 1 / 4)
    q[..., :64] = 0
    k[..., :64] = 0
    o, lse = way.attend(q, k, v, d_head=128)
    torch.testing.assert_close(o, torch.full_like(o, 2.692815), **way.tolerance)
    assert lse.item() == pytest.approx(4.517687, abs=1e-4)


@pytest.mark.parametrize(
    "sizes",
    [
        (0, 16, 16, 2, 2, 64), (2, 0, 16, 2, 2, 64), (2, 16, 0, 2, 2, 64), (2, 16, 16, 0, 0, 64),
        (2, 0, 0, 2, 2, 64), (1, 1, 0, 8, 2, 128), (2, 0, 4096, 2, 2, 64),
    ],
    ids=str,
)  # fmt: skip
@each_mask
def test_nothing_to_compute(way: Way, sizes: tuple[int, ...], causal: bool) -> None:
    batch, seq_len_q, seq_len_k, heads, heads_kv, d_head = sizes
    if d_head > 64 and way.name in ("ampere", "hopper"):
        pytest.skip("a configuration of head size 64")
    q, k, v = way.ramps((batch, seq_len_q, heads, d_head), (batch, seq_len_k, heads_kv, d_head))
    o, lse = way.attend(q, k, v, causal=causal, d_head=d_head)
    assert (o.shape, o.dtype, o.device) == (q.shape, q.dtype, q.device)
    assert lse.shape == (batch, heads, seq_len_q)
    assert (o == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize(("heads", "heads_kv"), [(6, 2), (20, 5), (6, 1)])
@each_mask
def test_neighbouring_heads_share_a_kv_head(way: Way, heads: int, heads_kv: int, causal: bool) -> None:
    v = way.full((1, 16, heads_kv, 64), 1.0) * torch.arange(1, heads_kv + 1, device=way.device)[:, None]
    v = v.to(way.kind)
    o, _ = way.attend(way.full((1, 16, heads, 64), 0.0), torch.zeros_like(v), v, causal=causal)
    for head in range(heads):
        assert (o[:, :, head] == head // (heads // heads_kv) + 1).all()
    way.check(*way.ramps((2, 70, heads, 64), (2, 100, heads_kv, 64)), causal=causal)


@pytest.mark.parametrize(("heads", "heads_kv"), [(5, 2), (7, 3), (17, 8), (2, 4), (4, 0), (0, 2)])
def test_heads_that_do_not_divide_are_refused(way: Way, heads: int, heads_kv: int) -> None:
    q, k = way.full((1, 16, heads, 64), 0.0), way.full((1, 16, heads_kv, 64), 0.0)
    out = way.full(q.shape, math.nan)
    with pytest.raises(ValueError, match=rf"\b{heads} heads.*\b{heads_kv}\b"):
        attention(q, k, k, out=out, config=way.config(False))
    assert out.isnan().all()


# ---------------------------------------------------------------------- memory that grows
def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_nothing_grows_over_2000_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the CPU; keys 1 to 1000 twice, a new scale in each call, in each of the types that it may have."""
    monkeypatch.setenv("FLASH_ATTENTION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "build_kernels", lambda *_: pytest.fail("compiled"))
    q, k, v = (ramp((1, n, 2, 64), a) for n, a in ((4, 5), (1000, 7), (1000, 11)))
    scales = (float, np.float64, torch.tensor)
    after = {}
    for call in range(2000):
        n = call % 1000 + 1
        attention(q, k[:, :n], v[:, :n], softmax_scale=scales[call % 3](0.05 + 1e-5 * call))
        if call in (50, 1999):
            gc.collect()
            after[call] = resident_bytes()
    assert after[1999] - after[50] < 20e6
    assert not (tmp_path / "cache").exists()
    alive = weakref.ref(q)
    del q
    assert alive() is None
