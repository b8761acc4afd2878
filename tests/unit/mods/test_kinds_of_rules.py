"""What functions of PyTorch record has the type that PyTorch's result has: a bool, a whole or a real number.

Another type is another value later on: ``~`` of a bool is no complement, and ``/`` of whole numbers is real.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from test_rules import of_all
from torch import Tensor
from torch.nn import functional

from flash_attention.errors import ModError
from flash_attention.mods import trace
from flash_attention.mods.evaluate import evaluate
from flash_attention.mods.symbols import Symbol

SEEN = torch.tensor([[True, False, True], [False, False, True], [True, True, True], [False, False, False]])
WHOLE = torch.tensor([[2, -3, 0], [1, 5, -4], [7, 7, 2], [-1, 0, 6]])

VALUES: dict[str, Callable[..., Any]] = {
    "bool": lambda s, b, h, q, k: q > k,
    "whole": lambda s, b, h, q, k: q - 2 * k + 1,
    "real": lambda s, b, h, q, k: s,
}
OTHERS = VALUES | {
    "True": lambda *_: True,
    "3": lambda *_: 3,
    "1.5": lambda *_: 1.5,
    "0": lambda *_: 0,
}
OF_ONE: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in ("sum", "any", "all", "amax", "amin", "max", "min")},
    **{name: getattr(torch, name) for name in ("sign", "sgn", "square", "nan_to_num", "floor", "round")},
    **{name: getattr(torch, name) for name in ("relu", "abs", "exp", "reciprocal", "logical_not", "frac")},
    "hardtanh": functional.hardtanh,
    "threshold": lambda x: functional.threshold(x, 0.5, 2.5),
    "relu6": functional.relu6,
    "power of 0": lambda x: x**0,
    "power of 3": lambda x: x**3,
    "real power": lambda x: torch.float_power(x, 2),
    "complement": lambda x: ~x,
}  # fmt: skip
OF_TWO: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in ("minimum", "maximum", "max", "min", "clamp", "clamp_max")},
    **{name: getattr(torch, name) for name in ("add", "mul", "remainder", "true_divide", "bitwise_and")},
    **{name: getattr(torch, name) for name in ("logical_or", "heaviside", "fmod", "xlogy", "lt", "rsub")},
    "add with a factor": lambda x, y: torch.add(x, y, alpha=2),
    "type_as": lambda x, y: x.type_as(y),
    "type of another": lambda x, y: x.to(y),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "masked_fill": lambda x, y: x.masked_fill(x > 0, y),
    "opposite of the least": lambda x, y: ~torch.minimum(x, y),
}  # fmt: skip
OF_A_ROW: dict[str, Callable[..., Any]] = {
    "largest": lambda x: x.amax(-1),
    "smallest": lambda x: x.amin(-1),
    "max": lambda x: x.max(),
    "no largest": lambda x: ~x.amax(-1),
    "sum": lambda x: x.sum(-1),
    "single ones": lambda x: x.new_ones(()).sum() + x.new_full((), 3).sum() + x.new_zeros(()).sum(),
}
INDICES = (torch.arange(2), torch.arange(1), torch.arange(4), torch.arange(4))
SCORE = torch.linspace(-2, 2, 32).view(2, 1, 4, 4)


def real(x: Any) -> Any:
    """A score of any value."""
    return torch.where(x, 1.0, 0.0) if x.dtype is torch.bool else x * 1.0


def kind(dtype: torch.dtype) -> str:
    return "bool" if dtype is torch.bool else "real" if dtype.is_floating_point else "whole"


def check(function: Callable[..., Any]) -> bool:
    """Whether both PyTorch and the library take a function; they have to agree on what it gives then."""
    types: list[torch.dtype] = []

    def scored(*given: Any) -> Any:
        value = function(*given)
        types.append(value.dtype)
        return real(value)

    try:
        expected = of_all(scored, SCORE, *INDICES)
    except (RuntimeError, TypeError, IndexError, AttributeError, ZeroDivisionError):
        return False
    try:
        traced = trace(scored)
    except ModError:
        return False
    places = [x.view([-1 if i == axis else 1 for i in range(4)]) for axis, x in enumerate(INDICES)]
    found = evaluate(traced, "score", SCORE, *places).expand(SCORE.shape)
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert kind(types[0]) == kind(types[-1])
    return True


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", OF_ONE)
def test_of_one_value(name: str) -> None:
    assert any([check(lambda *given, v=v: OF_ONE[name](v(*given))) for v in VALUES.values()])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", OF_TWO)
def test_of_two_values(name: str) -> None:
    pairs = product(VALUES.values(), OTHERS.values())
    assert any([check(lambda *given, v=v, w=w: OF_TWO[name](v(*given), w(*given))) for v, w in pairs])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", OF_A_ROW)
def test_of_a_row(name: str) -> None:
    def row(table: Tensor) -> Callable[..., Any]:
        return lambda s, b, h, q, k: OF_A_ROW[name](table[q])

    assert check(row(WHOLE)) | check(row(SEEN))


def test_a_mask_may_be_the_least_or_the_largest_of_masks() -> None:
    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ~torch.maximum(torch.minimum(q >= k, k > 0), q == 2)

    q, k = torch.arange(4)[:, None], torch.arange(4)
    zero = torch.tensor(0)
    found = evaluate(trace(None, mask), "visible", None, zero, zero, q, k)
    assert torch.equal(found, mask(0, 0, q, k))


def test_an_index_of_a_computed_row_is_refused_as_one() -> None:
    with pytest.raises(ModError, match=r"a value of 1 dimensions is indexed.*Index captured tensors"):
        trace(lambda s, b, h, q, k: s + (WHOLE[q] + WHOLE[k])[q % 3])


@pytest.mark.parametrize("named", ["torch.LongTensor", None])
def test_a_type_that_is_no_type_is_refused(named: str | None) -> None:
    with pytest.raises(ModError, match=r"type\(.*\) is not recorded, at .*\.to\(torch\.int64\)"):
        trace(lambda s, b, h, q, k: s.type(named) * 1.0)
    for converted in (lambda x: x.type(torch.int64), lambda x: x.to("cpu", torch.int64, True)):
        traced = trace(lambda s, b, h, q, k, converted=converted: converted(s) / 2)
        assert traced.mod.uses("to_int")


def test_symbols_say_which_type_they_have() -> None:
    seen: list[Any] = []
    trace(lambda s, b, h, q, k: seen.append(torch.maximum(q > k, q > 2)) or s)
    assert isinstance(seen[0], Symbol)
    assert seen[0].dtype is torch.bool
