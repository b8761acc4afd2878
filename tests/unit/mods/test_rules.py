"""What functions of PyTorch record is what PyTorch computes, called with single values by ``torch.vmap``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flash_attention.errors import ModError
from flash_attention.mods import trace
from flash_attention.mods.evaluate import evaluate

ROW = torch.tensor([1, 2, 5, -3])
TWO = np.float32(2.5)
ONES = torch.zeros(())
THREE = torch.tensor(3.0)
ROWS = torch.linspace(-1, 1, 12).view(4, 3)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": lambda s, b, h, q, k: torch.min(s, k * 0.1 + torch.zeros_like(s)),
    "max of whole numbers": lambda s, b, h, q, k: s + torch.max(q - k, torch.zeros_like(q)),
    "method": lambda s, b, h, q, k: s.max(torch.zeros_like(s)),
    "of a row": lambda s, b, h, q, k: s + ROW.max() + torch.min(ROW * (q - k)),
    "truncated": lambda s, b, h, q, k: s + torch.div(q - k, 4, rounding_mode="trunc"),
    "truncated by less than 0": lambda s, b, h, q, k: s + torch.div(q - k, -3, rounding_mode="trunc"),
    "truncated by values": lambda s, b, h, q, k: (
        s + (q - k).div((2 * b - 1) * (h + 1), rounding_mode="trunc")
    ),
    "truncated real numbers": lambda s, b, h, q, k: torch.div(s, 0.3, rounding_mode="trunc"),
    "fmod": lambda s, b, h, q, k: s + torch.fmod(q - k, 4) + torch.fmod(q - k, -3),
    "fmod of real numbers": lambda s, b, h, q, k: torch.fmod(s, 0.4),
    "fmod by values": lambda s, b, h, q, k: s + (q - k).fmod(b + 2),
    "log10": lambda s, b, h, q, k: s - torch.log10((q - k).abs() + 1),
    "hardtanh": lambda s, b, h, q, k: functional.hardtanh(s) + functional.relu6(s * 9),
    "new_full": lambda s, b, h, q, k: s + q.new_full((), 2.5, dtype=torch.float32) + s.new_full((), 1),
    "isin": lambda s, b, h, q, k: torch.where(torch.isin(k, ROW), s, -s),
    "not isin": lambda s, b, h, q, k: s + torch.isin(q - k, ROW, invert=True),
    "alpha": lambda s, b, h, q, k: (
        torch.add(s, 1.5, alpha=0.5) + s.sub(q, alpha=2) + torch.sub(s, THREE, alpha=2)
    ),
    "a captured value first": lambda s, b, h, q, k: (
        torch.clamp(THREE, ONES, s) + torch.fmod(THREE, k + 2) + torch.maximum(THREE, s) + torch.pow(THREE, s)
    ),
    "a captured row first": lambda s, b, h, q, k: (
        s + torch.fmod(ROW, k + 2).sum(-1) + torch.mul(ROW, q).amax(-1)
    ),
    "a row as an exponent": lambda s, b, h, q, k: ((s * 0.1 + 2) ** ROW).sum(-1),
    "trigonometry": lambda s, b, h, q, k: (
        torch.tan(s * 0.5) + torch.sinh(s) + torch.sinh(s * 1e-4) + torch.cosh(s)
    ),
    "lerp": lambda s, b, h, q, k: torch.lerp(s, s * s, 0.25) + torch.lerp(s, 2 * s, s),
    "addcmul": lambda s, b, h, q, k: torch.addcmul(s, s, s * 2, value=0.5) + torch.addcdiv(s, s, s * s + 1),
    "hypot": lambda s, b, h, q, k: torch.hypot(s, 0.5 * s) + torch.logaddexp(s, s * s),
    "logaddexp of infinity": lambda s, b, h, q, k: torch.exp(
        torch.logaddexp(torch.where(q > k, s, -math.inf), torch.where(q > 4, s, -math.inf))
    ),
    "xlogy": lambda s, b, h, q, k: torch.xlogy(s, 2.5) + torch.xlogy(torch.relu(s), s),
    "frac": lambda s, b, h, q, k: (
        torch.frac(s * 3) + torch.heaviside(s, THREE) + torch.heaviside(s * 0, THREE)
    ),
    "nan_to_num": lambda s, b, h, q, k: (
        torch.nan_to_num(torch.log(s), neginf=-3.0)
        + torch.nan_to_num(1 / (s * 0), posinf=2.0)
        + (s / 0).nan_to_num(4.0, 5.0, 6.0)
    ),
    "activations": lambda s, b, h, q, k: (
        functional.mish(s) + functional.selu(s) + functional.celu(s, alpha=0.5) + functional.softsign(s)
    ),
    "hard activations": lambda s, b, h, q, k: (
        functional.hardswish(4 * s) + functional.hardsigmoid(4 * s) + functional.threshold(s, 0.5, 2.0)
    ),
    "shrinks": lambda s, b, h, q, k: (
        functional.softshrink(s) + functional.hardshrink(s, 0.3) + functional.tanhshrink(s)
    ),
    "where, as a method": lambda s, b, h, q, k: (
        s.where(q > k, -1.5)
        + (q > k).where(k > 2, False)
        + THREE.where(q > 1, s)
        + s.where(condition=k > q, other=h)
    ),
    "NaN": lambda s, b, h, q, k: (
        torch.nan_to_num(torch.sign(s / 0 * 0), 7.0)
        + torch.nan_to_num(functional.hardshrink(s / 0 * 0), 8.0)
        + torch.nan_to_num(functional.threshold(s / 0 * 0, 0.5, 1.0), 9.0)
        + torch.nan_to_num(torch.xlogy(s * 0, s / 0 * 0), 5.0)
        + torch.nan_to_num(torch.clamp(s, min=math.nan), 4.0)
        + torch.nan_to_num(torch.clamp(s / 0 * 0, -1.0, 1.0), 3.0)
    ),
    "decimals": lambda s, b, h, q, k: (
        torch.round(s, decimals=1) + torch.round(s * 300, decimals=-2) + q.round()
    ),
    "signs": lambda s, b, h, q, k: torch.sign(s) + torch.sign(q - k) + torch.sgn(s * 0),
    "embedding": lambda s, b, h, q, k: (
        s + functional.embedding((q - k) % 4, ROWS).sum(-1) * torch.embedding(ROWS, q % 4).amax(-1)
    ),
    "numbers of NumPy": lambda s, b, h, q, k: s ** np.int64(2) + (q + 1) ** TWO + (q - k) // TWO,
}


def of_all(function: Callable[..., Any], *values: Tensor) -> Tensor:
    for place in range(len(values) - 1, 0, -1):
        function = torch.vmap(function, (0, *(0 if i == place else None for i in range(1, len(values)))))
    return function(*values)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_numbers_of_pytorch(name: str) -> None:
    function = FUNCTIONS[name]
    score = torch.linspace(-2, 2, 2 * 3 * 9 * 9).view(2, 3, 9, 9)
    indices = [torch.arange(n) for n in score.shape]
    places = [x.view([-1 if i == axis else 1 for i in range(4)]) for axis, x in enumerate(indices)]
    found = evaluate(trace(function), "score", score, *places)
    torch.testing.assert_close(
        found.expand(score.shape), of_all(function, score, *indices), rtol=1e-5, atol=1e-5
    )


def t5_bucket(relative: Any, both: bool, n: int = 32, most: int = 128) -> Any:
    """As Transformers' T5 has it."""
    buckets = 0
    if both:
        n //= 2
        buckets = buckets + (relative > 0).to(torch.long) * n
        relative = torch.abs(relative)
    else:
        relative = -torch.min(relative, torch.zeros_like(relative))
    exact = n // 2
    far = exact + (torch.log(relative.float() / exact) / math.log(most / exact) * (n - exact)).to(torch.long)
    far = torch.min(far, torch.full_like(far, n - 1))
    return buckets + torch.where(relative < exact, relative, far)


@pytest.mark.parametrize("both", [False, True])
def test_the_buckets_of_t5(both: bool) -> None:
    table = torch.randn(32)
    q, k = torch.arange(300)[:, None], torch.arange(300)
    nothing = torch.zeros(())
    found = evaluate(
        trace(lambda s, b, h, q, k: s + table[t5_bucket(k - q, both)]),
        "score", nothing, nothing.long(), nothing.long(), q, k,
    )  # fmt: skip
    torch.testing.assert_close(found, table[t5_bucket(k - q, both)])


WRITES: dict[str, Callable[..., Any]] = {
    "method": lambda s, b, h, q, k: s.add_(1),
    "function": lambda s, b, h, q, k: torch.relu_(s) * 0 + s,
    "of torch.nn": lambda s, b, h, q, k: functional.leaky_relu_(s) * 0 + s,
    "captured": lambda s, b, h, q, k: ONES.add_(s) * 0 + s,
    "element": lambda s, b, h, q, k: ROW.__setitem__(q, 1) or s,
    "keyword": lambda s, b, h, q, k: functional.relu(s, inplace=True) * 0 + s,
    "by place": lambda s, b, h, q, k: functional.leaky_relu(s, 0.1, True) * 0 + s,
}


@pytest.mark.parametrize("name", WRITES)
def test_what_would_be_written_is_refused(name: str) -> None:
    with pytest.raises(ModError, match=r"(writes to .*|inplace=True), at .*A mod writes nothing") as caught:
        trace(WRITES[name])
    assert "test_rules.py" in str(caught.value)


def test_arguments_that_a_function_does_not_have() -> None:
    for function in (lambda s, b, h, q, k: s.floor(1), lambda s, b, h, q, k: s.round(2)):
        with pytest.raises(ModError, match=r"is called in a way that is not recorded.*test_rules\.py"):
            trace(function)


def test_a_tensor_of_a_value_is_refused() -> None:
    for function in (lambda s, b, h, q, k: s + torch.tensor(q), lambda s, b, h, q, k: torch.as_tensor(s)):
        with pytest.raises(
            ModError, match=r"makes a tensor of a value.*test_rules\.py.*Compute with the value"
        ):
            trace(function)


def test_numbers_of_numpy_are_results() -> None:
    assert trace(lambda s, b, h, q, k: TWO).mod == trace(lambda s, b, h, q, k: 2.5).mod
    assert trace(None, lambda b, h, q, k: np.bool_(True)).mod == trace(None, lambda b, h, q, k: True).mod


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf, -1e30])
def test_constants_are_computed_where_python_raises(value: float) -> None:
    function = lambda s, b, h, q, k: (  # noqa: E731
        torch.sigmoid(torch.full_like(s, value)) + torch.remainder(torch.full_like(s, math.inf), value)
    )
    one = torch.ones(())
    found = evaluate(trace(function), "score", one, *[one.long()] * 4, dtype=torch.float64)
    torch.testing.assert_close(found.float(), function(one, *[one.long()] * 4), equal_nan=True)


def test_numpy_is_told_what_to_take() -> None:
    array = np.zeros(8)
    for function in (lambda s, b, h, q, k: np.exp(s), lambda s, b, h, q, k: s + array[q]):
        with pytest.raises(ModError, match=r"NumPy takes a value.*torch\.from_numpy\(array\)"):
            trace(function)


@pytest.mark.parametrize("inplace", [False, True])
def test_what_a_program_would_write_is_refused(inplace: bool) -> None:
    from flash_attention import attention

    q = torch.zeros(1, 8, 1, 8).half()

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return functional.relu(s, inplace=True) if inplace else s + ONES.add_(i) * 0

    with pytest.raises(Exception, match="A mod writes nothing"):
        torch.compile(lambda: attention(q, q, q, score_mod=score_mod), fullgraph=True, backend="eager")()
