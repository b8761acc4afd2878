"""Which functions add to a score what follows from the distance, and which of these do so evenly."""

from __future__ import annotations

import pytest
import torch

from flash_attention.mods.tracing import trace
from flash_helpers.mods.added import added_terms, adds_evenly

SLOPES, TABLE = torch.linspace(0.1, 0.4, 4), torch.randn(4, 32)
EVENLY = {
    "ALiBi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "of a power": lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 8.0 / 4)) * (k - q),
    "subtracted": lambda s, b, h, q, k: s - SLOPES[h] * (q - k),
    "before the score": lambda s, b, h, q, k: (k - q) * 0.5 + s,
    "with an offset": lambda s, b, h, q, k: s + SLOPES[h] * (q + 3 - k) / 7 - 2.0,
    "two terms": lambda s, b, h, q, k: s + 0.25 * (k - q) - SLOPES[h] * (k - q + h),
    "places apart": lambda s, b, h, q, k: s + 0.1 * (-k + q + h - 2),
}
OTHERWISE = {
    "both sides": lambda s, b, h, q, k: s - SLOPES[h] * abs(q - k),
    "a table": lambda s, b, h, q, k: s + TABLE[h, q - k + 15],
    "hidden": lambda s, b, h, q, k: s + torch.where(q - k > 3, 0.0, -torch.inf),
    "even and not": lambda s, b, h, q, k: s + 0.1 * (k - q) + TABLE[h, q - k + 15],
    "a square": lambda s, b, h, q, k: s + 0.1 * (k - q) * (k - q),
    "whole quotients": lambda s, b, h, q, k: s + SLOPES[h] * ((k - q) // 4),
    "a rounded product": lambda s, b, h, q, k: s + SLOPES[h] * ((k - q) * 3).abs(),
}
NEITHER = {
    "the score": lambda s, b, h, q, k: s,
    "of the head": lambda s, b, h, q, k: s + SLOPES[h],
    "scaled": lambda s, b, h, q, k: s * 2.0 + SLOPES[h] * (k - q),
    "taken away": lambda s, b, h, q, k: SLOPES[h] * (k - q) - s,
    "capped": lambda s, b, h, q, k: torch.tanh(s + SLOPES[h] * (k - q)),
    "of a place": lambda s, b, h, q, k: s + 0.1 * (k - q) + 0.1 * k,
    "of the score": lambda s, b, h, q, k: s + s * (k - q),
    "hidden by a place": lambda s, b, h, q, k: torch.where(k > 3, s + 0.1 * (k - q), s),
}


@pytest.mark.parametrize("name", EVENLY)
def test_what_grows_evenly(name: str) -> None:
    mod = trace(EVENLY[name], None).mod
    assert added_terms(mod)
    assert adds_evenly(mod)


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_of_the_distance_otherwise(name: str) -> None:
    mod = trace(OTHERWISE[name], None).mod
    assert added_terms(mod)
    assert not adds_evenly(mod)


@pytest.mark.parametrize("name", NEITHER)
def test_what_is_not_of_the_distance_alone(name: str) -> None:
    mod = trace(NEITHER[name], None).mod
    assert added_terms(mod) == ()
    assert not adds_evenly(mod)
