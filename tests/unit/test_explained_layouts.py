"""``explain_choice`` about packed sequences, caches and servers' calls: what the call itself gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention import attention, attention_varlen, explain_choice, last_kernel
from flash_attention.cached import attention_cached
from flash_attention.call import Mask, problem_of
from flash_attention.layouts import Cached, Layout, Packed, PackedCached
from flash_attention.run.cuda_choice import choice_for
from flash_helpers.kernel_configs import device_facts

QUERIES, KEYS, HEADS, HEADS_KV, D, PAGE = (40, 1, 3), (300, 64, 17), 8, 2, 128, 16
CAPACITY, LONGEST = 320, 40


def ints(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def rows(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, HEADS_KV, D, generator=generator).bfloat16()


def asked(form: str) -> tuple[tuple[Tensor, Tensor], dict[str, Any], Layout]:
    """q and k, the arguments behind them, and the layout of the call."""
    q = torch.randn(sum(QUERIES), HEADS, D).bfloat16()
    ends, counts, table = ints([0, *accumulate(QUERIES)]), ints(KEYS), ints(range(60)).view(3, 20)
    packed = {"cu_seqlens_q": ends, "max_seqlen_q": LONGEST, "max_seqlen_k": CAPACITY}
    if form == "packed":
        ends_k = ints([0, *accumulate(KEYS)])
        given = packed | {"cu_seqlens_k": ends_k}
        return (q, rows(sum(KEYS))), given, Packed(ends, ends_k, LONGEST, CAPACITY)
    if form == "cache":
        return (
            (torch.randn(3, 4, HEADS, D).bfloat16(), rows(3, CAPACITY)),
            {"seqused_k": counts},
            Cached(counts),
        )
    if form == "pages":
        given = {"seqused_k": counts, "block_table": table}
        return (torch.randn(3, 4, HEADS, D).bfloat16(), rows(60, PAGE)), given, Cached(counts, table)
    layout = PackedCached(ends, None, None, counts, table, LONGEST, CAPACITY, 2)
    given = packed | {"seqused_k": counts, "block_table": table, "n_splits": 2}
    return (q, rows(60, PAGE)), given, layout


FORMS = ["packed", "cache", "pages", "planned"]


@pytest.mark.parametrize("numerics", [None, "invariant"])
@pytest.mark.parametrize("device", ["H200", "A100"])
@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_that_is_not_there(form: str, device: str, numerics: str | None) -> None:
    (q, k), given, layout = asked(form)
    facts = device_facts(device)
    problem = problem_of(
        q, k, k, Mask.of(True, (None, None)), layout=layout, lse=True, invariant=numerics is not None
    )
    wanted = choice_for(problem, facts, device, None, explained=False)
    found = explain_choice(q, k, k, causal=True, return_lse=True, facts=facts, numerics=numerics, **given)
    assert found.kernel == wanted.kernel
    assert found.n_splits == wanted.n_splits
    assert found.rejected
    assert ("planned" in found.kernel.short_form()) == (form == "planned")
    assert (found.numeric_class is None) == (numerics is None)
    on_meta = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in given.items()}
    q, k = q.to("meta"), k.to("meta")
    again = explain_choice(q, k, k, causal=True, return_lse=True, facts=facts, numerics=numerics, **on_meta)
    assert again.kernel == found.kernel


@pytest.mark.parametrize("form", FORMS)
def test_the_call_runs_what_was_said(form: str) -> None:
    (q, k), given, _ = asked(form)
    options = {"causal": True, "return_lse": True}
    if "cu_seqlens_q" in given:
        attention_varlen(q, k, k, **({"cu_seqlens_k": None} | given), **options)
    else:
        attention_cached(q, k, k, **given, **options)
    assert last_kernel() == explain_choice(q, k, k, **given, **options).kernel


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cu_seqlens_q": ints([0, 4])}, "cu_seqlens_q is given without max_seqlen_q"),
        ({"cu_seqlens_q": ints([0, 4]), "max_seqlen_q": 4}, "cu_seqlens_q is given without max_seqlen_k"),
        ({"max_seqlen_q": 4}, "max_seqlen_q is given without cu_seqlens_q"),
        ({"cu_seqlens_k": ints([0, 4])}, "cu_seqlens_k is given without cu_seqlens_q"),
        ({"n_splits": 2}, "n_splits is given without cu_seqlens_q"),
        ({"block_table": ints([[0]])}, "block_table is given without seqused_k"),
        ({"seqused_k": ints([1, 1])}, r"seqused_k has shape \(2,\); it must be \(1,\)"),
    ],
)
def test_what_does_not_fit_is_named(given: dict[str, Any], words: str) -> None:
    q = torch.zeros(1, 4, HEADS, D).bfloat16()
    k = torch.zeros(1, 4, HEADS_KV, D).bfloat16()
    with pytest.raises(ValueError, match=words):
        explain_choice(q, k, k, **given)


@pytest.mark.parametrize("form", ["pages", "planned"])
def test_there_are_no_gradients_to_explain(form: str) -> None:
    (q, k), given, _ = asked(form)
    with pytest.raises(NotImplementedError, match="gradients are asked about, and keys in pages"):
        explain_choice(q, k, k, direction="backward", **given)
    with pytest.raises(NotImplementedError, match="tensors that do not require grad"):
        explain_choice(q.requires_grad_(), k, k, **given)


@pytest.mark.parametrize("function", [attention, attention_varlen, attention_cached])
def test_every_argument_of_a_call_can_be_asked_about(function: Callable[..., Any]) -> None:
    arguments = inspect.signature(function).parameters.values()
    names = {x.name for x in arguments if x.kind is not x.VAR_KEYWORD}
    assert names <= set(inspect.signature(explain_choice).parameters)


@pytest.mark.parametrize("form", FORMS)
def test_what_has_no_influence_is_taken_and_checked(form: str) -> None:
    (q, k), given, _ = asked(form)
    plain = explain_choice(q, k, k, **given)
    seed = torch.tensor(3)
    assert explain_choice(q, k, k, **given, validate=True, dropout_seed=seed).kernel == plain.kernel
    with pytest.raises(TypeError, match=r"^validate is 'no'"):
        explain_choice(q, k, k, **given, validate="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^dropout_seed is 3"):
        explain_choice(q, k, k, **given, dropout_seed=3)  # type: ignore[arg-type]


def test_there_is_nothing_to_read_without_offsets_counts_and_pages() -> None:
    q = torch.randn(1, 4, 2, 64).bfloat16()
    with pytest.raises(ValueError, match=r"^validate is True, and no offsets, counts or pages are given"):
        explain_choice(q, q, q, validate=True)
