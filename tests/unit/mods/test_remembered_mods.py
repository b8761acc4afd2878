"""Functions that were recorded before are found without a call, never where they might do something else."""

from __future__ import annotations

import functools
import gc
import math

import pytest
import torch
from gallery import GALLERY

import flash_attention
from flash_attention.mods import and_masks, remembered
from flash_attention.mods.guards import UnguardedError, guard_of

CPU = torch.device("cpu")
WIDTH = 5
TABLE = torch.arange(8.0)


@pytest.fixture(autouse=True)
def forget():
    remembered._known.clear()
    yield
    remembered._known.clear()


def known(score=None, mask=None):
    return remembered.known(score, mask)


def record(score=None, mask=None):
    return remembered.recorded(score, mask, CPU)


def shifted(x, table):
    return lambda s, b, h, q, k: s + x * table[k]


def test_a_function_made_anew_is_the_same() -> None:
    table = torch.arange(8.0)
    assert known(shifted(2.0, table)) is None
    first = record(shifted(2.0, table))
    found = known(shifted(2.0, table))
    assert found is not None
    assert found.mod == first.mod
    assert record(shifted(2.0, table)).tensors[0] is table
    assert found.token > 0
    assert known(shifted(2.0, table)).token == found.token


@pytest.mark.parametrize(
    ("x", "table"),
    [(2.5, None), (2, None), (-2.0, None), (0.0, None), (2.0, torch.arange(8.0)), (True, None)],
)
def test_other_values_are_not(x, table) -> None:
    own = torch.arange(8.0)
    record(shifted(2.0, own))
    assert known(shifted(x, own if table is None else table)) is None


def test_zeros_of_two_signs_differ() -> None:
    table = torch.arange(8.0)
    record(shifted(0.0, table))
    assert known(shifted(-0.0, table)) is None
    record(shifted(math.nan, table))
    assert known(shifted(float("nan"), table)) is not None


def test_a_tensor_that_is_gone_is_no_other() -> None:
    record(shifted(2.0, torch.arange(8.0)))
    gc.collect()
    for _ in range(20):
        assert known(shifted(2.0, torch.arange(8.0))) is None


def test_a_cell_that_changes() -> None:
    limit = 3

    def mask(b, h, q, k):
        return q - k < limit

    record(mask=mask)
    assert known(mask=mask) is not None
    limit = 4
    assert known(mask=mask) is None
    assert record(mask=mask).numbers == (4,)


def test_globals_defaults_and_partial(monkeypatch) -> None:
    def by_global(s, b, h, q, k):
        return s + TABLE[k] * WIDTH

    record(by_global)
    assert known(by_global) is not None
    monkeypatch.setitem(globals(), "WIDTH", 6)
    assert known(by_global) is None
    monkeypatch.setitem(globals(), "WIDTH", 5)
    assert known(by_global) is not None
    monkeypatch.setitem(globals(), "TABLE", torch.arange(8.0))
    assert known(by_global) is None

    def by_default(s, b, h, q, k, x=1.5, *, y=2.5):
        return s * x + y

    record(by_default)
    assert known(by_default) is not None
    by_default.__defaults__ = (1.25,)
    assert known(by_default) is None
    by_default.__defaults__, by_default.__kwdefaults__ = (1.5,), {"y": 2.0}
    assert known(by_default) is None
    by_default.__kwdefaults__ = {"y": 2.5}
    assert known(by_default) is not None

    def given(x, s, b, h, q, k):
        return s * x

    record(functools.partial(given, 2.0))
    assert known(functools.partial(given, 2.0)) is not None
    assert known(functools.partial(given, 3.0)) is None


def test_a_name_that_begins_to_hide_a_builtin(monkeypatch) -> None:
    def mask(b, h, q, k):
        return q >= k + max(1, 2)

    record(mask=mask)
    assert known(mask=mask) is not None
    monkeypatch.setitem(globals(), "max", min)
    assert known(mask=mask) is None


class Holder:
    width = 3


def counted(b, h, q, k):
    global COUNT
    COUNT = 1
    return q >= k


HOLDER, LIST, COUNT = Holder(), [3], 0


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: q - k < HOLDER.width,
        lambda b, h, q, k: q - k < LIST[0],
        counted,
        lambda b, h, q, k: q - k < int(TABLE[3]),
        lambda b, h, q, k: TABLE.exp()[k] > 1.0,
        lambda b, h, q, k: q + torch.tensor(3) >= k,
        lambda b, h, q, k: q >= k + TABLE.sum().item(),
        lambda b, h, q, k: (q + torch.randint(3, (), generator=None).item()) >= k,
    ],
)
def test_what_depends_on_more_is_called_each_time(mask) -> None:
    record(mask=mask)
    assert known(mask=mask) is None


def test_calls_of_attention_find_their_functions() -> None:
    q = k = v = torch.randn(1, 8, 2, 16).half()
    table, calls = torch.arange(8.0), []

    def bias(s, b, h, q_idx, kv_idx):
        return s + table[kv_idx]

    def counting(b, h, q_idx, kv_idx):
        calls.append(1)
        return q_idx >= kv_idx

    flash_attention.attention(q, k, v, score_mod=bias)
    assert known(bias) is not None
    first = flash_attention.attention(q, k, v, score_mod=bias)
    table += 7.0 * torch.arange(8.0)  # contents are not a part of it
    assert not torch.equal(flash_attention.attention(q, k, v, score_mod=bias), first)
    for n in (1, 2, 3):
        flash_attention.attention(q, k, v, mask_mod=counting)
        assert len(calls) == n


def test_most_of_the_gallery_has_guards() -> None:
    without = []
    for name, (_, function) in GALLERY.items():
        try:
            assert guard_of(function)(function), name
        except UnguardedError:
            without.append(name)
    assert len(without) <= 3, without


def test_masks_of_masks() -> None:
    def masks(n):
        return and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k <= n)

    record(mask=masks(3))
    assert known(mask=masks(3)) is not None
    assert known(mask=masks(4)) is None
