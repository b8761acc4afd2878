"""The binding's side of functions that were recorded before: what is compared of a value, and by what."""

from __future__ import annotations

import functools
import gc
import math
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from flash_attention_kernels import KnownFunctions

from flash_attention.mods.guards import UnguardedError, guards_of


def holds(guard: Any, value: Any) -> bool:
    return KnownFunctions(guard, None, 1, (), (), 2).match(value, None) is not None


class Numbers(tuple[Any, ...]):
    pass


NAN = math.nan
TENSOR = torch.zeros(3)


@pytest.mark.parametrize(
    ("guard", "same", "others"),
    [
        (("is", math), [math], [torch, None]),
        (("equals", 3), [3], [4, 3.0, True, None, "3"]),
        (("equals", "text"), ["".join(("te", "xt"))], ["texts", b"text"]),
        (("bits", 0.0), [0.0], [-0.0, 0, None]),
        (("bits", NAN), [float("nan")], [-float("nan"), 0.0]),
        (("tensor", weakref.ref(TENSOR)), [TENSOR], [torch.zeros(3), None]),
        (("items", tuple, (("equals", 1), ("bits", 2.0))), [(1, 2.0)], [(1, 2), (1,), (1, 2.0, 3), [1, 2.0]]),
        (("items", tuple, ()), [()], [(None,), Numbers()]),
        (("asks", lambda x: x > 2), [3], [2, "text"]),  # which raises
    ],
)
def test_values(guard: Any, same: list[Any], others: list[Any]) -> None:
    assert all(holds(guard, x) for x in same)
    assert not any(holds(guard, x) for x in others)


def test_a_tensor_with_attributes_of_its_own_is_not_as_it_was() -> None:
    tensor = torch.zeros(3)
    guard = ("tensor", weakref.ref(tensor))
    assert holds(guard, tensor)
    tensor.offset = 3  # type: ignore[attr-defined]
    assert not holds(guard, tensor)
    del tensor.offset  # type: ignore[attr-defined]
    assert holds(guard, tensor)
    del tensor
    assert not holds(guard, None)


def of(function: Any) -> Any:
    return guards_of((function,), (), asks_where=False)[0]


def test_numbers_of_numpy() -> None:
    def made(n: Any) -> Any:
        return lambda b, h, q, k: q - k < n

    guard = of(made(np.int64(3)))
    assert holds(guard, made(np.int64(3)))
    assert not any(holds(guard, made(n)) for n in (np.int64(4), np.int32(3), 3, np.float64(3), None))
    assert holds(of(made(np.float32(0.5))), made(np.float32(0.5)))
    for n in (np.float64(0.0), np.float32(math.nan), np.array(3)):
        with pytest.raises(UnguardedError):
            of(made(n))


def test_partial() -> None:
    def score(x: Any, s: Any, *rest: Any, by: Any = 1) -> Any:
        return s * x * by

    given = functools.partial(score, 2.0, by=3)
    guard = of(given)
    assert holds(guard, functools.partial(score, 2.0, by=3))
    for other in (
        functools.partial(score, 2.5, by=3),
        functools.partial(score, 2.0, by=4),
        functools.partial(score, 2.0),
        functools.partial(score, 2.0, 3.0, by=3),
        functools.partial(max, 2.0, by=3),
        score,
    ):
        assert not holds(guard, other)


def test_a_variable_that_lost_its_value() -> None:
    limit = 3

    def forget() -> None:
        nonlocal limit
        del limit

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < limit

    guard = of(mask)
    assert holds(guard, mask)
    forget()
    assert not holds(guard, mask)


@pytest.mark.parametrize(
    "guard",
    [
        3, (), ("is",), ("is", 1, 2), ("other", 1), ("bits", 1), ("items", tuple), ("items", tuple, 3),
        ("items", tuple, (3,)), ("function", 1, None, (), (), ()), (3, 4),
        ("function", 1, None, (("name", ("is", 1)),), (), (), None, None),
        ("function", 1, {}, (), (), (), None, (("is", 1),)), ("function", 1, {}, 3, (), (), None, None),
        ("partial", functools.partial, ("is", 1), ("is", 2), ()),
    ],
)  # fmt: skip
def test_what_is_no_guard_is_refused(guard: Any) -> None:
    with pytest.raises((TypeError, IndexError)):
        KnownFunctions(guard, None, 1, (), (), 2)


@pytest.mark.parametrize("given", [(), (None,) * 5, (None, None, 1, 2, (), 3), (None, None, 1, (), 2, 3)])
def test_other_arguments_are_refused(given: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        KnownFunctions(*given)
    with pytest.raises(TypeError):
        KnownFunctions(None, None, 1, (), (), 2).match(None)


def test_what_a_launch_compares() -> None:
    one, other = torch.zeros(1), torch.zeros(2)
    tensors = weakref.ref(one), weakref.ref(other)
    functions = KnownFunctions(None, None, "key", ((0,),), tensors, "bare")
    key, compared, bare = functions.match(None, None)
    assert (key, bare, compared[0]) == ("key", "bare", (0,))
    assert compared[1] is one
    assert compared[2] is other
    assert functions.match(max, None) is None
    del compared, other
    assert functions.match(None, None) is None
    assert KnownFunctions(None, None, "key", (), None, "bare").match(None, None) == ("key", None, "bare")


def test_a_circle_of_references_is_given_back() -> None:
    class Named:
        pass

    held = Named()
    held.functions = KnownFunctions(("is", held), None, held, (), (), held)  # type: ignore[attr-defined]
    gone = weakref.ref(held)
    del held
    gc.collect()
    assert gone() is None


HEARD = """
import sys, torch
from flash_attention.mods import and_masks, remembered
from flash_attention.run import launch_cache

table, document = torch.zeros(8), torch.zeros(64).long()
causal = lambda b, h, q, k: q >= k
one = (lambda s, b, h, q, k, scale=2.0, *, by=3: s * scale + table[h] * by,
       and_masks(causal, lambda b, h, q, k: document[q] == document[k]))
tables = [torch.zeros(8) for _ in range(4)]
def of(own): return lambda s, b, h, q, k: s + own[h]
layers = [one, *((of(own), None) for own in tables)]
for mods in layers:
    remembered.recorded(*mods, table.device)
for _ in range(2):
    for mods in layers:
        assert launch_cache.mods_of(*mods) is not None
heard = []
sys.addaudithook(lambda event, args: heard.append(event))
found = [launch_cache.mods_of(*mods) for mods in layers]
events = tuple(heard)
for x, own in zip(found[1:], tables):
    assert x[1][0] is own
assert found[0] is not None
causal.__code__
assert len(heard) > len(events)  # that would have been heard
print(events)
"""


def test_audit_hooks_hear_nothing_of_functions_that_are_known() -> None:
    """Each word to a hook of Python's takes as long as all else that is asked of a function.

    None is said where layers with functions of their own call one after the other, either.
    """
    ran = subprocess.run([sys.executable, "-c", HEARD], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "()"
