"""Kernels whose functions add what follows from the distance, beside what else a call may ask for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attention

pytestmark = pytest.mark.gpu

BATCH, HEADS, KV_HEADS = 2, 4, 2
Score = Callable[..., Any]


def added(device: str) -> dict[str, Score]:
    """Functions whose tensors are on a device, by name: even ones, and others."""
    slopes = torch.tensor([0.5, 0.11, -0.2, 0.004]).to(device)
    table = torch.randn(HEADS, 900, generator=torch.Generator().manual_seed(2)).to(device)

    def buckets(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = torch.abs(q_idx - kv_idx)
        far = 16 + (torch.log(torch.clamp(distance, min=1) / 16) / math.log(8) * 16).long()
        return score + table[h, torch.where(distance < 16, distance, torch.clamp(far, max=31))]

    return {
        "ALiBi": lambda s, b, h, q, k: s + slopes[h] * (k - q),
        "two even terms": lambda s, b, h, q, k: s + 0.3 * (k - q) - slopes[h] * (k + 5 - q) - 40.0,
        "buckets": buckets,
        "of both sides": lambda s, b, h, q, k: s - torch.abs(slopes[h]) * torch.abs(q - k),
        "a hidden head": lambda s, b, h, q, k: s + slopes[h] * (k - q) + torch.where(h == 1, -torch.inf, 0.0),
        "hiding": lambda s, b, h, q, k: s + torch.where(torch.abs(k - q) < 100, 0.1 * b, -torch.inf),
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"causal": True},
    "window": {"window": (170, 30)},
    "mask": {"mask_mod": lambda b, h, q, k: (q + k + h) % 3 != 0},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 1, HEADS)},
    "negative scale": {"softmax_scale": -0.3},
    "no scale": {"softmax_scale": 0.0},
    "exact": {"out_dtype": torch.float32},
}


def inputs(seq_q: int, seq_k: int, d: int, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(seq_q, HEADS), (seq_k, KV_HEADS), (seq_k, KV_HEADS)]
    return [torch.randn(BATCH, n, h, d, generator=generator).to(dtype) for n, h in shapes]


def check(name: str, x: list[Tensor], tolerance: float = 4e-3, **options: Any) -> None:
    there = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in options.items()}
    on_device = [t.cuda() for t in x]
    found = flash_attention.attention(*on_device, return_lse=True, score_mod=added("cuda")[name], **there)
    right = flash_attention.attention(*x, return_lse=True, score_mod=added("cpu")[name], **options)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one.cpu().double(), other.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", added("cpu"))
def test_beside_other_options(name: str, options: str) -> None:
    d = 64 if options in ("mask", "sinks") else 128
    for seq_q, seq_k in ((330, 330), (300, 700), (64, 65)):
        check(name, inputs(seq_q, seq_k, d), **OPTIONS[options])


@pytest.mark.parametrize("d", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ["ALiBi", "buckets"])
def test_each_head_size(name: str, d: int) -> None:
    check(name, inputs(700, 700, d, torch.bfloat16), tolerance=1.6e-2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["ALiBi", "buckets"])
def test_few_queries_over_many_keys(name: str, causal: bool) -> None:
    for seq_q in (1, 5, 70):
        check(name, inputs(seq_q, 2100, 128), causal=causal)


@pytest.mark.parametrize("name", ["ALiBi", "buckets", "hiding"])
def test_packed_sequences_count_their_own_places(name: str) -> None:
    lengths = [(5, 40), (0, 3), (260, 300), (17, 1)]
    ends = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0).int() for n in zip(*lengths, strict=True)]
    q, k, v = (t[0] for t in inputs(400, 400, 64))
    packed = [q[: ends[0][-1]], k[: ends[1][-1]], v[: ends[1][-1]]]
    call = [*packed, *ends]
    found = flash_attention.attention_varlen(
        *(t.cuda() for t in call), 260, 300, return_lse=True, score_mod=added("cuda")[name]
    )
    right = flash_attention.attention_varlen(*call, 260, 300, return_lse=True, score_mod=added("cpu")[name])
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one.cpu().double(), other.double(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("name", ["ALiBi", "buckets"])
def test_scores_that_outgrow_their_reference(name: str) -> None:
    """Where scores jump up between tiles they are computed again."""
    q, k, v = inputs(300, 700, 128)
    k[:, :300] *= 40
    check(name, [q, k, v], tolerance=1e-2)


def test_a_far_distance_costs_no_accuracy() -> None:
    """The last keys of many count most, far from each query."""
    q, k, v = inputs(130, 9000, 64)
    check("ALiBi", [q, k, v])
