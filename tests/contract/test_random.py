"""Random calls of ``attention`` and ``attention_varlen`` against the float64 reference.

A failure shrinks to the smallest case; of ``attention`` it has a one-line repeat.
``--hypothesis-profile=long`` draws ten times as many.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import pytest
import torch
from contract_kernels import FEATURES
from hypothesis import given
from hypothesis import strategies as st

from flash_attention import attention_varlen
from flash_helpers import generation
from flash_helpers.kernel_configs import DType
from flash_helpers.test.cases import LAYOUTS, Case
from flash_helpers.test.reference import reference

LENGTHS = st.one_of(
    st.integers(0, 5), st.integers(6, 140), st.sampled_from((63, 64, 65, 127, 128, 129, 255, 256, 257, 513))
)
LIMITS = st.one_of(st.none(), st.integers(0, 9), st.integers(10, 300))


@st.composite
def cases(draw: st.DrawFn, cuda: bool) -> Case:
    """Any case; for CUDA, of what kernels exist for."""
    # On CUDA one of the sets of features that kernels were built for.
    features = draw(st.sampled_from(FEATURES)) if cuda else None

    def has(feature: str) -> bool:
        return draw(st.booleans()) if features is None else feature in features

    windowed = has("window")
    d_head = 8 * draw(st.integers(1, 16 if cuda else 32))
    d_head_v = d_head if draw(st.booleans()) else 8 * draw(st.integers(1, 16 if cuda else 32))
    return Case(
        dtype=draw(st.sampled_from(DType)),
        batch=draw(st.integers(0, 3)),
        seq_len_q=draw(LENGTHS),
        seq_len_k=draw(LENGTHS),
        n_heads_kv=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        d_head=d_head,
        d_head_v=d_head_v,
        causal=has("causal"),
        window=(draw(LIMITS), draw(LIMITS)) if windowed else (None, None),
        softmax_scale=draw(st.sampled_from((None, None, 0.0, 0.05, 1.0, -0.3))),
        softcap=draw(st.sampled_from((1.0, 20.0))) if has("softcap") else 0.0,
        sinks=has("sinks"),
        magnitude=draw(st.sampled_from((1.0, 1.0, 0.0, 4.0))),
        layouts=tuple(draw(st.sampled_from(LAYOUTS)) for _ in range(3)),
        seed=draw(st.integers(0, 3)),
    )


@given(cases(cuda=False))
def test_cpu(case):
    case.check("cpu")


@pytest.fixture(scope="module")
def without_compiling() -> Iterator[None]:
    """Calls run the best kernel that is built: one for every head size and feature would take hours."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("FLASH_ATTENTION_JIT", "0")
        warnings.filterwarnings("ignore", ".* runs in its place", RuntimeWarning)
        generation.begin()
        yield
    generation.begin()


@pytest.mark.gpu
@given(cases(cuda=True))
def test_cuda(without_compiling, case):
    case.check("cuda")


# ---------------------------------------------------------------------- packed sequences
# Queries and keys of each sequence; often one query of each, as in decoding.
SEQUENCES = st.lists(st.tuples(st.integers(0, 140), st.integers(0, 300)), min_size=1, max_size=6) | st.lists(
    st.tuples(st.just(1), st.integers(0, 300)), min_size=1, max_size=6
)


def check_packed(device: str, sequences: list[tuple[int, int]], d: int, causal: bool, spare: int) -> None:
    """Compares each sequence with the reference. ``spare``: by how much the announced maxima are larger."""
    generator = torch.Generator().manual_seed(d)
    parts = [
        [torch.randn(1, n, heads, d, generator=generator).half().to(device) for n, heads in rows]
        for rows in (((n_q, 4), (n_k, 2), (n_k, 2)) for n_q, n_k in sequences)
    ]
    q, k, v = (torch.cat([part[i][0] for part in parts]) for i in range(3))
    offsets = [
        torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=device)
        for n in zip(*sequences, strict=True)
    ]
    longest = [max(n) + spare for n in zip(*sequences, strict=True)]
    out, lse = attention_varlen(q, k, v, *offsets, *longest, causal=causal, return_lse=True, validate=True)
    first = 0
    for (n_q, _), tensors in zip(sequences, parts, strict=True):
        expected, expected_lse = reference(*tensors, causal=causal)
        rows = slice(first, first + n_q)
        torch.testing.assert_close(out[rows].double(), expected[0], atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(lse[:, rows].double(), expected_lse[0], atol=1e-3, rtol=2e-6)
        first += n_q


@given(SEQUENCES, st.sampled_from((8, 64, 72)), st.booleans(), st.integers(0, 3))
def test_packed_cpu(sequences, d, causal, spare):
    check_packed("cpu", sequences, d, causal, spare)


@pytest.mark.gpu
@given(SEQUENCES, st.sampled_from((16, 64)), st.booleans(), st.integers(0, 3))
def test_packed_cuda(without_compiling, sequences, d, causal, spare):
    check_packed("cuda", sequences, d, causal, spare)


def test_a_failure_says_how_to_repeat_it(monkeypatch):
    case = Case(DType.BF16, 1, 3, 4, 1, 2, 8, 16, layouts=("packed", "one_batch", "offset"))
    monkeypatch.setattr("flash_helpers.test.cases.TOLERANCES", {DType.BF16: 0.0})
    with pytest.raises(AssertionError) as caught:
        case.check("cpu")
    line = str(caught.value).splitlines()[-1]
    expression = line.removeprefix('python -c "from flash_helpers.test.cases import *; ').removesuffix(
        ".check('cpu')\""
    )
    assert eval(expression, {"Case": Case, "DType": DType}) == case
