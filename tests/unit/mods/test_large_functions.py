"""Functions near the limit of operations: what reads a mod neither runs out of Python's stack nor reads parts
that are used twice once for each way to them, of which there may be 2^100."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_attention import attention
from flash_attention.mods import trace
from flash_helpers.mods.added import added_terms, adds_evenly
from flash_helpers.mods.documents import DocumentForm, document_form
from flash_helpers.mods.plain_forms import Band, plain_form

NUMBERS = tuple(range(1, 481))
DOCUMENT = torch.arange(20) // 5


def long_sum(left: int, numbers: tuple[int, ...] = NUMBERS) -> Any:
    def mask(b, h, q, k):
        for n in numbers:
            q = q + n
        return q >= k + sum(NUMBERS) - left

    return mask


def doubled_terms(first: Any) -> Any:
    def mask(b, h, q, k):
        seen = first(q, k)
        for n in range(100):
            seen = (seen & (q - k > n - 500)) & (seen & (k - q > n - 500))
        return seen

    return mask


def long_and(b, h, q, k):
    seen = q >= k
    for n in NUMBERS:
        seen = (q - k < 500 - n) & seen
    return seen


@pytest.mark.parametrize(
    ("mask", "band"),
    [
        (long_sum(3), Band(high=3)),
        (doubled_terms(lambda q, k: q >= k), Band(-400, 0)),
        (long_and, Band(-19, 0)),
    ],
)
def test_bands(mask: Any, band: Band) -> None:
    traced = trace(None, mask)
    assert len(traced.mod.nodes) > 500
    assert plain_form(traced.mod, traced.numbers).band == band


def test_documents() -> None:
    traced = trace(None, doubled_terms(lambda q, k: DOCUMENT[q] == DOCUMENT[k]))
    assert document_form(traced.mod, traced.numbers) == DocumentForm(0, False, Band(-400, 400))


def test_what_is_added_evenly() -> None:
    def whole(s, b, h, q, k):
        distance = k - q
        for _ in range(50):
            distance = distance + distance
        return s + distance * 1e-16

    def real(s, b, h, q, k):
        added = (k - q) * 0.5
        for n in range(100):
            added = added + added if n < 20 else added * 0.5 + added * 0.25
        for n in NUMBERS:
            added = added + n * 0.001
        return s + added

    for function in (whole, real):
        mod = trace(function).mod
        assert added_terms(mod)
        assert adds_evenly(mod)


def test_calls() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 20, 2, 16, generator=generator).half().requires_grad_() for _ in range(3))
    found = attention(q, k, v, mask_mod=long_sum(3))
    assert torch.equal(found, attention(q, k, v, mask_mod=lambda b, h, q, k: q >= k - 3))
    found.sum().backward()
    assert q.grad is not None
