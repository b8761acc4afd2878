"""Functions that say what options say: they become options, and mean the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flash_attention import attention, explain_choice, last_kernel
from flash_attention.mods import trace
from flash_helpers.kernels.device_facts import device_facts
from flash_helpers.mods.plain_forms import Band, plain_form

WIDTH, CAP = 40, 30.0

BANDS: dict[str, tuple[Callable[..., Any], Band]] = {
    "causal": (lambda b, h, q, k: q >= k, Band(high=0)),
    "strictly causal": (lambda b, h, q, k: k < q, Band(high=-1)),
    "window": (lambda b, h, q, k: (q >= k) & (q - k <= WIDTH), Band(-WIDTH, 0)),
    "both sides": (lambda b, h, q, k: torch.abs(q - k) < WIDTH, Band(1 - WIDTH, WIDTH - 1)),
    "sums": (lambda b, h, q, k: k + 3 <= q + WIDTH - 1, Band(high=WIDTH - 4)),
    "negative": (lambda b, h, q, k: -k + q > -5, Band(high=4)),
    "a number first": (lambda b, h, q, k: k - q >= 7, Band(low=7)),
    "everything": (lambda b, h, q, k: q >= q, Band()),
}


def doubled_often(b: Any, h: Any, q: Any, k: Any) -> Any:
    for _ in range(60):
        q = q + q
    return q >= k


NO_BANDS: dict[str, Callable[..., Any]] = {
    "prefix": lambda b, h, q, k: (k < 20) | (q >= k),
    "a limit of keys": lambda b, h, q, k: (k < 20) & (q >= k),
    "by head": lambda b, h, q, k: q - k <= 8 * h,
    "doubled often": doubled_often,
    "doubled": lambda b, h, q, k: 2 * q >= k,
    "the sum": lambda b, h, q, k: q + k >= 50,
    "nothing": lambda b, h, q, k: q < q,
    "a far number": lambda b, h, q, k: q - k <= 2**40,
}


def caps(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return CAP * torch.tanh(score / CAP)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mods: dict[str, Any]) -> torch.Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / math.sqrt(q.shape[-1])
    rows, keys = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    heads = torch.arange(q.shape[2])[:, None, None]
    if "score_mod" in mods:
        scores = mods["score_mod"](scores, 0, heads, rows, keys)
    if "mask_mod" in mods:
        scores = scores.masked_fill(~torch.as_tensor(mods["mask_mod"](0, heads, rows, keys)), -math.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).nan_to_num(), v.double())


@pytest.mark.parametrize("name", BANDS)
def test_a_band_is_read(name: str) -> None:
    function, band = BANDS[name]
    traced = trace(None, function)
    form = plain_form(traced.mod, traced.numbers)
    assert (form.band, form.softcap, form.rest) == (band, 0.0, None)


@pytest.mark.parametrize("name", NO_BANDS)
def test_what_is_no_band_stays_a_function(name: str) -> None:
    traced = trace(None, NO_BANDS[name])
    assert plain_form(traced.mod, traced.numbers).rest is traced.mod


def test_scores() -> None:
    traced = trace(caps, None)
    assert plain_form(traced.mod, traced.numbers) == (Band(), CAP, None)
    assert plain_form(traced.mod, traced.numbers, softcap=False).rest is traced.mod
    same = trace(lambda score, b, h, q, k: score, None)
    assert plain_form(same.mod, same.numbers) == (Band(), 0.0, None)
    for other in (
        lambda score, b, h, q, k: CAP * torch.tanh(score / (CAP + 1)),
        lambda score, b, h, q, k: CAP * torch.tanh(score / CAP) + h,
        lambda score, b, h, q, k: -CAP * torch.tanh(score / -CAP),
    ):
        traced = trace(other, None)
        assert plain_form(traced.mod, traced.numbers).rest is traced.mod


def test_a_function_of_scores_stays_beside_a_mask_that_is_an_option() -> None:
    table = torch.randn(4)
    traced = trace(lambda score, b, h, q, k: score + table[h], BANDS["causal"][0])
    form = plain_form(traced.mod, traced.numbers)
    assert form.band == Band(high=0)
    assert form.rest is not None
    assert [name for name, _ in form.rest.results] == ["score"]
    assert form.rest.tensors == traced.mod.tensors


@pytest.mark.parametrize("lengths", [(70, 70), (70, 130), (130, 70), (1, 90)])
@pytest.mark.parametrize("name", BANDS)
def test_it_means_the_same(name: str, lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 16, dtype=torch.float32) for n in (lengths[0], lengths[1], lengths[1]))
    q, k, v = (x.bfloat16().requires_grad_() for x in (q, k, v))
    for mods in ({"mask_mod": BANDS[name][0]}, {"mask_mod": BANDS[name][0], "score_mod": caps}):
        out = attention(q, k, v, **mods)
        expected = reference(q, k, v, mods)
        torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)
        dout = torch.randn_like(out)
        found = torch.autograd.grad(out, (q, k, v), dout)
        wanted = torch.autograd.grad(expected, (q, k, v), dout.double())
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.double(), b.double(), atol=0.04, rtol=0.04)


def test_kernels_of_options_run() -> None:
    q = torch.randn(1, 50, 2, 16).bfloat16()
    attention(q, q, q, mask_mod=BANDS["causal"][0], score_mod=caps)
    kernel = last_kernel()
    assert kernel.mod is None
    assert kernel.traits.causal
    assert kernel.traits.softcap
    meta = q.to("meta")
    choice = explain_choice(meta, meta, meta, mask_mod=BANDS["window"][0], facts=device_facts("h100"))
    assert choice.kernel.mod is None
    assert choice.kernel.traits.window


def test_limits_meet_those_of_the_call() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, n, 2, 16).bfloat16() for n in (60, 90, 90))
    found = attention(q, k, v, window=(50, 10), mask_mod=BANDS["window"][0])
    both = {"mask_mod": lambda b, h, q, k: (k <= q) & (q - k <= WIDTH) & (k >= q - 20) & (k <= q + 40)}
    torch.testing.assert_close(found.double(), reference(q, k, v, both), atol=0.02, rtol=0.02)
