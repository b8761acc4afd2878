"""Layouts and options declare one order of arguments: operators, remembered calls and keys follow it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from flash_attention import attention, attention_varlen
from flash_attention.backends import cpu, cuda
from flash_attention.cached import attention_cached
from flash_attention.call import Call, Mask, Scores
from flash_attention.layouts import NAMES, Cached, Dense, Packed
from flash_attention.mods.tracing import trace
from flash_attention.options import Options
from flash_attention.run import launch_cache
from flash_attention.run.operator_schema import SentMod, received, schema, sent

Q = torch.zeros(1, 4, 2, 64, dtype=torch.float16)
ENDS = torch.tensor([0, 4], dtype=torch.int32)
USED = torch.tensor([4], dtype=torch.int32)
TABLE = torch.tensor([[0]], dtype=torch.int32)
CALLS = [
    (attention, Q, Dense(), {}),
    (attention_varlen, Q[0], Packed(ENDS, ENDS, 4, 4), {}),
    (attention_cached, Q, Cached(USED, TABLE), {"block_table": TABLE}),
]


def test_backends_run_a_call_alike() -> None:
    assert inspect.signature(cpu.run) == inspect.signature(cuda.run)
    assert list(inspect.signature(cpu.run).parameters) == ["call", "choice"]


@pytest.mark.parametrize(
    ("function", "q", "layout", "keywords"), CALLS, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_call_is_asked_for_as_it_is_remembered(
    monkeypatch: pytest.MonkeyPatch, function: Any, q: torch.Tensor, layout: Any, keywords: dict[str, Any]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(launch_cache, "repeat", lambda key, *given: asked.append((key, given)))
    out, sinks = torch.empty_like(q, dtype=torch.float32), torch.zeros(2)
    options = Options(True, 0.5, (3, 1), 2.0, sinks, False, out, None, "cpu", torch.float32, 7, True)
    leading = [
        x for name, x in zip(layout._fields, layout, strict=True) if name not in ("block_table", "validate")
    ]
    function(q, q, q, *leading, **options._asdict(), **keywords)
    ((key, given),) = asked
    other_ways = ("sinks", "out", "score_mod", "mask_mod", "dropout_p", "dropout_seed")
    stay = [x for name, x in options._asdict().items() if name not in other_ways]
    assert key == (NAMES[type(layout)], *stay)  # the options but the tensors, in the order of Options
    expected = (q, q, q, out, sinks, *layout.slots())
    assert len(given) == len(expected)
    assert all(x is y or x == y for x, y in zip(given, expected, strict=True))


@pytest.mark.parametrize("layout", NAMES)
def test_operators_take_what_layouts_and_options_declare(layout: type[Any]) -> None:
    registered = getattr(torch.ops.flash_attention, NAMES[layout]).default._schema
    names = [argument.name for argument in registered.arguments]
    options = [
        "sinks", "causal", "softmax_scale", "window_left", "window_right", "softcap", "return_lse", "config",
        "out_dtype", "n_sms", "deterministic", "backward_config", "numerics",
    ]  # fmt: skip
    mod = ["mod", "captured", "whole_numbers", "real_numbers"]
    assert names == ["q", "k", "v", *layout._fields, *options, *mod, "keep_lse"]
    assert f"({schema(layout)}, bool keep_lse) -> (Tensor, Tensor)" in str(registered)
    backward = getattr(torch.ops.flash_attention, f"{NAMES[layout]}_backward").default._schema
    assert f"Tensor out, Tensor lse, {schema(layout)}, bool dq, " in str(backward)


def test_options_come_back_from_an_operator() -> None:
    options = Options(True, 0.5, (3, 1), 2.0, torch.zeros(2), True, None, None, None, torch.float32, 7)
    assert received(tuple(sent(options._asdict(), SentMod.of(None))), None) == (options, None)


def test_a_mod_comes_back_from_an_operator() -> None:
    table, width, factor = torch.ones(4), 2**40, 0.5
    found = trace(lambda score, b, h, q, k: score * factor + table[h] * (q - k + width))
    sent_mod = SentMod.of(found)
    assert (sent_mod.whole_numbers, sent_mod.real_numbers) == ([width], [factor])
    options, again = received(tuple(sent(Options()._asdict(), sent_mod)), None)
    assert options == Options()
    assert again is not None
    assert (again.mod, again.numbers) == (found.mod, found.numbers)
    assert again.tensors[0] is table
    with pytest.raises(ValueError, match="takes 1 tensors, 1 whole and 1 real numbers, and is given 0, 1"):
        sent_mod._replace(captured=[]).traced()


def test_a_mask_says_causal_and_window_in_one() -> None:
    assert Mask.of(True, (None, None)) == (None, 0)
    assert Mask.of(True, (5, 7)) == (5, 0)
    assert Mask.of(False, (5, 7)) == (5, 7)
    assert Mask(5, 7).limits(8, 6) == (None, None)
    assert Mask(4, 6).limits(8, 6) == (4, 6)


def test_the_problem_of_each_layout() -> None:
    packed = Call(Q[0], Q[0], Q[0], Q[0], None, Mask(), Scores(1.0), Packed(ENDS, ENDS, 3, 2)).problem
    assert (packed.batch, packed.seq_len_q, packed.seq_len_k, packed.varlen, packed.cached) == (
        1,
        3,
        2,
        True,
        False,
    )
    pages = torch.zeros(5, 16, 2, 64, dtype=torch.float16)
    table = torch.zeros(1, 3, dtype=torch.int32)
    paged = Call(Q, pages, pages, Q, None, Mask(), Scores(1.0, 2.0), Cached(USED, table)).problem
    assert (paged.seq_len_k, paged.cached, paged.paged, paged.softcap, paged.lse) == (
        48,
        True,
        True,
        True,
        False,
    )
    dense = Call(Q, Q, Q, Q, torch.empty(1, 2, 4), Mask(), Scores(1.0, sinks=torch.zeros(2))).problem
    assert (dense.varlen, dense.sinks, dense.lse) == (False, True, True)
