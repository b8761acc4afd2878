"""PyTorch's own attention in the place of the CPU backend's steps: where it computes the same."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flash_attention import attention, attention_varlen, explain_choice
from flash_attention.backends import cpu, cpu_fused
from flash_helpers.kernel_configs import FlashForwardKernelConfig
from flash_helpers.kernels.dtype import DType
from flash_helpers.test.utils import reference

STEPS = FlashForwardKernelConfig(DType.BF16, 64, 64, 256, 4, False, False, False, 0, 0, 0, False, True)
WINDOWS = [(None, None), (None, 0), (None, 7), (40, 0), (300, None), (0, 0), (5, 90)]
LENGTHS = [(1, 1), (1, 700), (37, 512), (600, 600), (900, 130), (130, 900)]


def inputs(
    seq_len_q: int, seq_len_k: int, batch: int = 2, heads: int = 4, heads_kv: int = 2, dtype=torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seq_len_q + seq_len_k)
    sizes = ((seq_len_q, heads), (seq_len_k, heads_kv), (seq_len_k, heads_kv))
    q, k, v = (torch.randn(batch, s, h, 64).to(dtype) for s, h in sizes)
    return q, k, v


@pytest.fixture
def calls(monkeypatch) -> list[bool]:
    """Whether ``cpu_fused.attention`` has left no batch item to the steps, call by call."""
    found: list[bool] = []
    original = cpu_fused.attention

    def recorded(*args: object) -> list[slice]:
        left = original(*args)  # type: ignore[arg-type]
        found.append(not left)
        return left

    monkeypatch.setattr(cpu_fused, "attention", recorded)
    return found


@pytest.mark.parametrize(("batch", "heads", "heads_kv"), [(1, 4, 1), (2, 4, 2), (3, 2, 2), (4, 4, 2)])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_it_computes_the_same(lengths, window, batch, heads, heads_kv, calls):
    q, k, v = inputs(*lengths, batch, heads, heads_kv)
    out = attention(q, k, v, window=window)
    assert calls == [True]
    expected, _ = reference(q, k, v, window=window)
    steps = attention(q, k, v, window=window, config=STEPS)
    assert len(calls) == 1
    error, own_error = ((x.double() - expected).abs().max() for x in (out, steps))
    assert error <= 2 * own_error + 1e-5
    assert attention(q, k, v, window=window).equal(out)


def test_float16_and_scales(calls):
    q, k, v = inputs(300, 300, dtype=torch.float16)
    for scale in (0.0, -0.3, 1.0):
        expected, _ = reference(q, k, v, causal=True, softmax_scale=scale)
        out = attention(q, k, v, causal=True, softmax_scale=scale)
        torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=1e-3)
    assert calls == [False, True, True]  # 0 times a hidden score of -inf is NaN


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :1].expand(-1, 200, -1, -1),  # one row for all
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.as_strided(x.shape, (*x.stride()[:1], 32, *x.stride()[2:])),  # rows overlap
        lambda x: torch.cat([x, x], -1)[..., 32:96],
        lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    ],
    ids=["broadcast", "heads first", "overlapping", "part of wider rows", "rows side by side"],
)
@pytest.mark.parametrize("left", [None, 30])
def test_any_strides(view, left, calls):
    q, k, v = inputs(200, 200, heads_kv=4)
    views = [view(x) for x in (q, k, v)]
    copies = [x.clone(memory_format=torch.contiguous_format) for x in views]
    out = attention(*views, causal=True, window=(left, None))
    assert out.equal(attention(*copies, causal=True, window=(left, None)))
    assert calls == [True, True]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_masks_take_the_memory_of_one_row(window, monkeypatch):
    masks: list[Tensor] = []
    original = cpu_fused.mask_of_reversed

    def recorded(*args):
        masks.append(original(*args))
        return masks[-1]

    monkeypatch.setattr(cpu_fused, "mask_of_reversed", recorded)
    q, k, v = inputs(600, 1000)
    out = attention(q, k, v, window=window)
    expected, _ = reference(q, k, v, window=window)
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
    for mask in masks:
        assert (mask is None) == (window == (None, None))
        assert mask is None or mask.untyped_storage().nbytes() <= 2 * (512 + 1000)


@pytest.mark.parametrize("place", [3, 250], ids=["visible", "hidden"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_for_the_steps(value, place, calls):
    q, k, v = inputs(256, 256)
    q[..., 0] = 1.0
    k[:, place, :, 0] = value
    ours, steps = attention(q, k, v, window=(8, 0)), attention(q, k, v, window=(8, 0), config=STEPS)
    assert calls == [value == -math.inf]  # that hides its key in both
    if calls == [False]:
        torch.testing.assert_close(ours, steps, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(ours, steps, rtol=1e-2, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("seq_len_q", [1, 77], ids=["one query", "queries"])
@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 4), (4, 2), (8, 1)])
def test_other_heads_and_items_feel_nothing_of_scores_that_are_not_finite(heads, heads_kv, seq_len_q, calls):
    q, k, v = inputs(seq_len_q, 77, 5, heads, heads_kv)
    finite = attention(q, k, v, causal=True)
    for item in (1, 2):
        k[item, 3, 0, 5] = math.nan
    q[4, -1, 1, 5] = math.nan
    out = attention(q, k, v, causal=True)
    assert calls == [True, False]
    steps = attention(q, k, v, causal=True, config=STEPS)
    group = heads // heads_kv
    spoilt = {(item, head) for item in (1, 2) for head in range(group)} | {(4, 1)}
    for item in range(5):
        for head in range(heads):
            if (item, head) in spoilt:
                one = out[item, :, head]
                assert one.isnan().any()
                torch.testing.assert_close(one, steps[item, :, head], rtol=1e-2, atol=1e-2, equal_nan=True)
            else:
                assert out[item, :, head].equal(finite[item, :, head])


def test_a_head_that_is_left_over_has_the_bits_that_it_has_alone():
    q, k, v = inputs(77, 77, 2, 8, 2)
    q[0, -1, 5, 5] = math.nan
    out = attention(q, k, v, causal=True)
    q[0, -1, 4, 5] = math.inf
    again = attention(q, k, v, causal=True)
    torch.testing.assert_close(again[0, :, 5], out[0, :, 5], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seq_len_k", [1, 2, 7, 8, 9, 15, 16, 17, 513])
@pytest.mark.parametrize("seq_len_q", [1, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_a_query_all_of_whose_scores_are_nan_shows_it(causal, seq_len_q, seq_len_k):
    q, k, v = inputs(seq_len_q, seq_len_k)
    q[0, -1, 1, 7] = math.nan
    out = attention(q, k, v, causal=causal)
    nan = torch.zeros_like(out, dtype=torch.bool)
    nan[0, -1, 1] = True
    assert out.isnan().equal(nan)
    q[0, -1, 1, 7], k[0, ..., 7] = 0.5, math.nan
    out = attention(q, k, v, causal=causal)
    blind = max(seq_len_q - seq_len_k, 0) if causal else 0
    assert out[0, blind:].isnan().all()
    assert not out[0, :blind].any()
    assert out[1].isfinite().all()


def test_scores_of_minus_infinity_beside_nan(calls):
    """One vector of scores that hide their keys, and behind it NaN."""
    q, k, v = inputs(3, 17)
    q[..., 0], k[:, :16, :, 0], k[:, 16, :, 0] = 1.0, -math.inf, math.nan
    assert attention(q, k, v).isnan().all()
    assert calls == [False]


def test_rows_of_minus_infinity_alone(calls):
    q, k, v = inputs(8, 16)
    q[..., 0], k[..., 0] = 1.0, -math.inf
    out = attention(q, k, v)
    assert len(calls) == 1
    assert not out.any()
    assert (attention(q, k, v, return_lse=True)[1] == -math.inf).all()


def test_packed_sequences_take_it_one_by_one(calls):
    q, k, v = (x.flatten(0, 1) for x in inputs(100, 100))
    offsets = torch.tensor([0, 30, 30, 200], dtype=torch.int32)
    out = attention_varlen(q, k, v, offsets, offsets, 170, 170, causal=True)
    assert calls == [True, True, True]
    assert out[30:].equal(attention(q[None, 30:], k[None, 30:], v[None, 30:], causal=True)[0])


@pytest.mark.parametrize("window", [(None, 150), (150, 150), (450, None)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_limits_that_hide_nothing_of_a_packed_sequence_change_no_bit_of_it(window, dtype):
    lengths = [(100, 129), (100, 100), (600, 600), (64, 400)]
    total_q, total_k = (sum(n) for n in zip(*lengths, strict=True))
    q, k, v = (torch.cat([x[0], x[0]], -1) for x in inputs(total_q, total_k, batch=1, dtype=dtype))
    ends = torch.tensor([(0, 0), *lengths]).cumsum(0).int()
    packed = attention_varlen(q, k, v, *ends.T.contiguous(), 600, 600, window=window)
    for (first_q, first_k), (last_q, last_k) in pairwise(ends.tolist()):
        alone = (q[None, first_q:last_q], k[None, first_k:last_k], v[None, first_k:last_k])
        assert packed[first_q:last_q].equal(attention(*alone, window=window)[0])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"softcap": 5.0}, "no soft cap"),
        ({"sinks": torch.zeros(4)}, "no sinks"),
        ({"return_lse": True}, "log-sum-exp"),
        ({"config": STEPS}, "insists"),
    ],
    ids=["softcap", "sinks", "lse", "config"],
)
def test_what_it_does_not_compute(changes, why, calls):
    q, k, v = inputs(64, 64)
    attention(q, k, v, **changes)
    assert calls == []
    choice = explain_choice(q, k, v, **changes)
    assert not choice.fused
    assert why in choice.reason


def test_two_head_sizes_and_a_torch_without_it(monkeypatch, calls):
    q, k, v = inputs(64, 64)
    attention(q, k, v[..., :32])
    assert "one head size" in explain_choice(q, k, v[..., :32]).reason
    monkeypatch.setattr(cpu_fused, "_fused", None)
    assert "does not have it" in cpu_fused.reason_against(64, 64, False, False, False)
    assert calls == []


def test_where_pytorch_raises_the_steps_are_taken(monkeypatch, calls):
    def refuses(*args, **options):
        raise RuntimeError("pack_vnni2 is only supported when avx512 is supported")

    q, k, v = inputs(64, 64)
    monkeypatch.setattr(cpu_fused, "_fused", refuses)
    assert attention(q, k, v, causal=True).equal(attention(q, k, v, causal=True, config=STEPS))
    assert calls == [False]


def test_the_choice_says_that_it_runs():
    q, k, v = inputs(64, 64)
    choice = explain_choice(q, k, v, causal=True)
    assert choice.fused
    assert "PyTorch's own attention" in choice.reason


@pytest.mark.perf
@pytest.mark.parametrize(
    ("batch", "lengths", "heads_kv", "window"),
    [
        (1, (512, 512), 8, (None, None)),
        (1, (512, 512), 8, (None, 0)),
        (3, (512, 512), 2, (None, 0)),
        (1, (512, 1024), 8, (None, 0)),
        (1, (1024, 512), 2, (None, None)),
        (1, (1024, 1024), 8, (256, 0)),
    ],
    ids=["full", "causal", "groups of heads in a batch", "behind a cache", "more queries", "window"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_quarter_of_the_speed_of_pytorch_at_least(dtype, batch, lengths, heads_kv, window):
    q, k, v = inputs(*lengths, batch, 8, heads_kv, dtype)
    theirs = [x.transpose(1, 2) for x in (q, k, v)]
    options: dict[str, object] = {"enable_gqa": heads_kv != 8}
    left, right = window
    if window == (None, 0) and lengths[0] == lengths[1]:
        options["is_causal"] = True
    elif right == 0:
        offset = lengths[1] - lengths[0]
        mask = torch.ones(lengths, dtype=torch.bool).tril(offset)
        options["attn_mask"] = mask if left is None else mask.triu(offset - left)

    def seconds(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    own, pytorch = math.inf, math.inf
    for _ in range(12):  # in turn: whatever else runs here slows both
        own = min(own, seconds(lambda: attention(q, k, v, window=window)))
        pytorch = min(pytorch, seconds(lambda: scaled_dot_product_attention(*theirs, **options)))
    assert pytorch >= 0.25 * own


def test_the_steps_are_what_forward_and_configurations_run(calls):
    q, k, v = inputs(64, 64)
    out = torch.empty_like(q)
    cpu.attention(STEPS, q, k, v, out, None, 64**-0.5)
    assert attention(q, k, v, config=STEPS).equal(out)
    assert calls == []
