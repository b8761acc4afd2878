"""Recorded functions compute what the functions compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from random_functions import function, grid, tables

from flash_attention.mods.evaluate import evaluate
from flash_attention.mods.tracing import trace

SEEDS = 1200


def widened(table: torch.Tensor) -> torch.Tensor:
    """A table whose type does not take part in the function's own arithmetic."""
    if table.is_floating_point():
        return table.double()
    return table if table.dtype is torch.bool else table.long()


@pytest.fixture
def _real_is_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_real_is_float64")
@pytest.mark.parametrize("kind", ["score", "mask"])
def test_random_functions(kind: str) -> None:
    captured = tables(torch.Generator().manual_seed(0))
    wide = {name: widened(table) for name, table in captured.items()}
    sizes = set()
    for seed in range(SEEDS // 2):
        own = function(seed, kind, captured)
        agree_with = function(seed, kind, wide)
        assert own.text == agree_with.text
        score, *indices = grid(torch.Generator().manual_seed(seed))
        scored = kind == "score"
        expected = agree_with.function(score, *indices) if scored else agree_with.function(*indices)
        traced = trace(own.function if scored else None, None if scored else own.function)
        found = evaluate(traced, "score" if scored else "visible", score, *indices, dtype=torch.float64)
        found, expected = torch.broadcast_tensors(found, torch.as_tensor(expected))
        torch.testing.assert_close(
            found.double(), expected.double(), rtol=1e-6, atol=1e-6, equal_nan=True,
            msg=lambda m, text=own.text: f"{text}\n{m}",
        )  # fmt: skip
        sizes.add(len(traced.mod.nodes))
    assert max(sizes) > 40


@torch.compile(backend="eager")
def helper(score):
    return score * 0.5


def test_what_torch_compile_made_is_recorded_as_the_function_itself() -> None:
    """In the place of a mod, in a closure and as a global."""

    @torch.compile(backend="eager")
    def half(score, *places):
        return score * 0.5

    expected = trace(lambda s, b, h, q, k: s * 0.5).mod
    assert trace(half).mod == expected
    assert trace(lambda s, b, h, q, k: half(s)).mod == expected
    assert trace(lambda s, b, h, q, k: helper(s)).mod == expected
