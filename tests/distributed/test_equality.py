"""Every option with every method on gloo: results and gradients are those of one process.

In float32, which goes past the checks of the public function, within 1e-5 of float64; in bfloat16 with an
error that is that of one process and does not grow with the ranks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Case, alone, error, exact, gathered, on_rank
from ranks import Raised, Ranks

ENDS = (0, 7, 7, 40, 61)
METHODS = ("all_gather", "ring", "ulysses")
WORLDS = [1, 2, 3, *(pytest.param(world, marks=pytest.mark.compile) for world in (4, 8))]

OPTIONS = {
    "causal": Case(),
    "full": Case(causal=False),
    "window": Case(window=(9, 0)),
    "window of both sides": Case(causal=False, window=(5, 11)),
    "window to the right": Case(causal=False, window=(0, None)),
    "window before": Case(causal=False, window=(12, -3)),
    "window behind": Case(causal=False, window=(-2, None), sinks=True),
    "softcap": Case(softcap=2.0),
    "sinks": Case(sinks=True),
    "sinks with a window and a cap": Case(sinks=True, window=(13, 0), softcap=3.0),
    "documents": Case(documents=ENDS),
    "documents with a window": Case(documents=ENDS, window=(6, 0), sinks=True),
    "full documents": Case(documents=ENDS, causal=False),
    "one head": Case(n_heads=1, n_heads_kv=1),
    "heads that do not divide": Case(n_heads=5, n_heads_kv=5),
    "groups that do not divide": Case(n_heads=6, n_heads_kv=2, batch=2),
    "a batch": Case(batch=3, sinks=True),
    "few rows": Case(total=2),
    "no row": Case(total=0, sinks=True),
    "another scale": Case(scale=-0.3),
    "no gradient of the LSE": Case(with_lse=False, sinks=True),
    "functions": Case(functions="both", causal=False),
    "functions of a batch with a window": Case(
        functions="both", window=(40, 0), batch=2, sinks=True, softcap=3.0
    ),
    "functions of documents": Case(functions="both", documents=ENDS, causal=False),
    "a function of masks": Case(functions="mask", causal=False),
    "functions of heads in parts": Case(functions="both", total=56, in_parts=True),
    # Schedules are kept, so that these lengths are in no other case.
    "heads in parts": Case(total=59, n_heads=10, n_heads_kv=5, sinks=True, in_parts=True),
    "a batch of heads in parts": Case(total=58, batch=2, causal=False, in_parts=True),
}
LAYOUTS = {
    "contiguous": Case(layout="contiguous", window=(20, 0)),
    "striped": Case(layout="striped"),
    "striped window": Case(layout="striped", window=(9, 0), sinks=True),
    "windowed": Case(layout="windowed", window=(20, 0), sinks=True),
    "per document": Case(layout="per_document", documents=ENDS),
    "uneven": Case(layout="uneven", causal=False, window=(30, 3)),
    "striped documents": Case(layout="striped", documents=ENDS, causal=False),
    "striped functions": Case(layout="striped", functions="both", causal=False),
    "functions per document": Case(layout="per_document", documents=ENDS, functions="mask"),
    "striped, heads in parts": Case(layout="striped", total=57, in_parts=True),
}
CASES = {**OPTIONS, **LAYOUTS}


def run(ranks: Ranks, case: Case, dtype: torch.dtype) -> list[object]:
    answers = ranks.run(on_rank, case, dtype)
    assert not any(isinstance(answer, Raised) for answer in answers), answers
    return answers


@pytest.mark.parametrize("ranks", WORLDS, indirect=True)
@pytest.mark.parametrize("method", METHODS)
def test_float32_is_within_1e_5_of_float64(ranks: Ranks, method: str) -> None:
    for name, case in CASES.items():
        case = replace(case, method=method)
        found = gathered(case, run(ranks, case, torch.float32))
        wanted = exact(case)
        for field, x, y in zip(found._fields, found, wanted, strict=True):
            if y is not None:
                assert torch.isfinite(x).all() or field == "lse", (name, field)
                finite = y != -torch.inf
                assert torch.equal(x != -torch.inf, finite), (name, field)
                far = (x[finite].double() - y[finite]).abs() > 1e-5 * (1 + y[finite].abs())
                assert not far.any(), (name, field, x[finite][far], y[finite][far])


@pytest.mark.parametrize("ranks", WORLDS, indirect=True)
@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_is_as_exact_as_one_process(ranks: Ranks, method: str) -> None:
    """Errors do not depend on the ranks: partial results are float32, and there is one rounding."""
    for name, case in CASES.items():
        case = replace(case, method=method)
        found = gathered(case, run(ranks, case, torch.bfloat16))
        wanted, single = exact(case), alone(case)
        for field, x, y, z in zip(found._fields, found, wanted, single, strict=True):
            if y is not None:
                least = 1e-6 * float(y[y != -torch.inf].square().mean().sqrt()) if y.numel() else 0.0
                # Of so few numbers as those of the sinks the mean error is chance.
                factor = 1.25 if y.numel() > 64 else 2.0
                assert error(x, y) <= factor * error(z, y) + least, (name, field, error(x, y), error(z, y))


@pytest.mark.parametrize("ranks", [3], indirect=True)
@pytest.mark.parametrize("method", METHODS)
def test_equal_calls_give_equal_bits(ranks: Ranks, method: str) -> None:
    case = Case(method=method, sinks=True, window=(17, 0), total=97)
    first, second = (run(ranks, case, torch.bfloat16) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all((x == y).all() for x, y in zip(one, other, strict=True))  # type: ignore[call-overload]
