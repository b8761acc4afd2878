"""What functions of the user's add to a call that was made before, counted in calls of Python's.

Tables of calls are stood for by one that knows all: what is counted is what stands before a launch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flash_attention import attention, attention_varlen
from flash_attention.cached import attention_cached
from flash_attention.compat.alibi import alibi
from flash_attention.compat.places import in_packed
from flash_attention.mods import and_masks, dense_bias, remembered
from flash_attention.run import launch_cache
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig, ForwardKernel

CONFIG = FlashForwardKernelConfig(DType.FP16, 64, 64, 64, 4, True, True, True, 0, 2, 2, True, True)
Q = torch.zeros(1, 8, 2, 64, dtype=torch.float16)
ENDS = torch.tensor([0, 8], dtype=torch.int32)
SLOPES, DOCUMENT, BIAS = torch.rand(2), torch.arange(8) // 3, torch.rand(2, 8, 8)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


# How many calls of Python's and of C's functions a call with functions may add at most: what it adds in
# Python 3.11, and two.
MOST_CALLS = 5
FUNCTIONS: dict[str, dict[str, Any]] = {
    "prefix": {"mask_mod": lambda b, h, q, k: (q >= k) | (k < 3)},
    "ALiBi": {"score_mod": lambda s, b, h, q, k: s + SLOPES[h] * (k - q)},
    "ALiBi of flash-attn's": {"score_mod": alibi(SLOPES, in_packed(ENDS, ENDS.clone()), True)},
    "bias": {"score_mod": dense_bias(BIAS)},
    "documents": {"mask_mod": and_masks(causal, lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k])},
}


class Knows:
    """Stands for a table: it gives what it is asked with."""

    last = None

    def call(self, *given: Any) -> tuple[Any, ...]:
        return given


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Any]]:
    remembered._known.clear()
    launch_cache.forget()
    made: dict[Any, Any] = {}
    monkeypatch.setattr(launch_cache, "_tables", made)
    yield made
    remembered._known.clear()


def ready(tables: dict[Any, Any], name: str, options: dict[str, Any]) -> None:
    """Everything is remembered of a call with these options."""
    mods = launch_cache.NO_MODS
    if options:
        given = options.get("score_mod"), options.get("mask_mod")
        remembered.recorded(*given, Q.device)
        found = launch_cache.mods_of(*given)
        assert found is not None
        mods = found
    table = Knows()
    tables[(name, False, None, (None, None), 0.0, False, *mods[0])] = (table, table.call, ())


def events(call: Callable[[], Any]) -> int:
    """How many functions of Python and of C a call calls."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    call()  # whatever is done once
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda **options: attention(Q, Q, Q, **options),
    "attention_varlen": lambda **options: attention_varlen(Q[0], Q[0], Q[0], ENDS, ENDS, 8, 8, **options),
    "attention_cached": lambda **options: attention_cached(Q, Q, Q, ENDS[1:], **options),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_add_few_calls(tables: dict[Any, Any], name: str, function: str) -> None:
    options = FUNCTIONS[function]
    ready(tables, name, {})
    ready(tables, name, options)
    call = CALLS[name]
    assert isinstance(call(**options), tuple)  # it is found
    plain, own = events(call), events(partial(call, **options))
    assert 0 < own - plain <= MOST_CALLS


class Heard(TorchFunctionMode):
    """Counts the functions of torch that are called."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_default_device_does_not_hear_of_it(tables: dict[Any, Any], function: str) -> None:
    """``torch.set_default_device`` makes a function of Python's of each question to a tensor."""
    options = FUNCTIONS[function]
    ready(tables, "attention", options)
    with Heard() as mode:
        given = attention(Q, Q, Q, **options)
    assert isinstance(given, tuple)
    assert mode.count == 0


# ---------------------------------------------------------------------- what must be noticed all the same
def test_what_is_given_to_a_table(tables: dict[Any, Any]) -> None:
    """Captured tensors, and the places of those of which bits of tiles are kept."""
    for function, tail in (("prefix", ()), ("ALiBi", (SLOPES,)), ("documents", ((0,), DOCUMENT))):
        options = FUNCTIONS[function]
        ready(tables, "attention", options)
        found = attention(Q, Q, Q, **options)[10:]
        assert len(found) == len(tail)
        for x, wanted in zip(found, tail, strict=True):
            assert x is wanted if isinstance(wanted, Tensor) else x == wanted


def test_bits_of_a_mask_without_tensors_are_of_one_stream(tables: dict[Any, Any]) -> None:
    options = {"mask_mod": lambda b, h, q, k: q % 3 == k % 3}
    ready(tables, "attention", options)
    assert attention(Q, Q, Q, **options)[10:] == ((),)


def test_more_tensors_than_are_compared_are_not_remembered() -> None:
    own = [torch.arange(8.0) for _ in range(remembered.MAX_TENSORS + 1)]
    a, b, c, d, e, f, g, h, last = own

    def score(s: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        return s + a[k] + b[k] + c[k] + d[k] + e[k] + f[k] + g[k] + h[k]

    def more(s: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        return score(s, batch, head, q, k) + last[k]

    for function, is_taken in ((score, True), (more, False)):
        remembered.recorded(function, None, Q.device)
        assert remembered.known(function, None) is not None
        assert (launch_cache.mods_of(function, None) is not None) == is_taken


class Table:
    """Stands for one of the binding's."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def remember(self, given: tuple[Any, ...], *_: Any) -> None:
        self.told.append(given)

    call = staticmethod(lambda *given: None)


def test_a_call_is_remembered_by_what_it_is_asked_with(
    tables: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long way tells a table of the call as the short way then asks for it."""
    from flash_attention.call import Ran
    from flash_attention.run import passes

    table, asked = Table(), []
    made = SimpleNamespace(call_table=lambda direction: table, maker_like=lambda x: x.clone)
    monkeypatch.setattr(launch_cache, "backend", lambda name: made)
    real = passes.backend("cpu").run

    def run(call: Any, choice: Any) -> Ran:
        real(call, choice)
        launched = SimpleNamespace(launch=print, arguments=())
        return Ran(ForwardKernel(CONFIG), launched)  # type: ignore[arg-type]

    monkeypatch.setattr(passes, "backend", lambda name: SimpleNamespace(run=run))
    options = FUNCTIONS["documents"]
    repeat = launch_cache.repeat
    monkeypatch.setattr(
        launch_cache, "repeat", lambda key, *given: asked.append(given) or repeat(key, *given)
    )
    for _ in range(3):
        attention(Q, Q, Q, **options)
    (given, *_) = table.told
    assert len(given) == len(asked[-1])
    assert all(x is y for x, y in zip(given, asked[-1], strict=True))
