"""Every parameter of every function by another library's name: it does something, or an error names it.

And the errors speak of the function's own parameters, not of what this library calls them.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from foreign_calls import FOREIGN, NO_WEIGHT, REFUSED, WRITTEN, Arguments, Foreign
from torch import Tensor

from flash_attention import attention, attention_varlen
from flash_attention.cached import attention_cached
from flash_attention.integrations import flash_attn_3, vllm

pytestmark = pytest.mark.only_on("cpu")  # what is refused, is before a device is asked
Refusal = (NotImplementedError, TypeError, ValueError)
OWN_NAMES = {
    name
    for function in (attention, attention_varlen, attention_cached)
    for name in inspect.signature(function).parameters
} - {"backend", "config", "out", "unknown"}  # which are English, too
PAIRS = [
    pytest.param(foreign, name, id=f"{title}: {name}".replace(" ", "_"))
    for title, foreign in FOREIGN.items()
    for name in inspect.signature(foreign.function).parameters
]


def results(foreign: Foreign, arguments: Arguments) -> list[Tensor]:
    """What a call gives; where that is nothing, what it writes."""
    torch.manual_seed(7)
    result = foreign.function(**arguments)
    if result is None:
        result = tuple(arguments[name] for name in ("v", "s"))
    return [x.clone() for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Tensor)]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def changed(foreign: Foreign, name: str, value: Any) -> Arguments:
    arguments = foreign.arguments()
    arguments[name] = value(arguments, name) if callable(value) else value
    return arguments


@pytest.mark.parametrize("title", FOREIGN)
def test_the_table_has_every_parameter(title: str) -> None:
    foreign = FOREIGN[title]
    assert set(inspect.signature(foreign.function).parameters) <= set(foreign.table)


@pytest.mark.parametrize(("foreign", "name"), PAIRS)
def test_no_parameter_is_ignored(foreign: Foreign, name: str) -> None:
    value, outcome = foreign.table[name]
    arguments = changed(foreign, name, value)
    if outcome == REFUSED:
        with pytest.raises(Refusal, match=rf"\b{name}\b"):
            foreign.function(**arguments)
    elif outcome == WRITTEN:
        if "return_softmax_lse" in inspect.signature(foreign.function).parameters:
            arguments["return_softmax_lse"] = True
        expected = results(foreign, arguments | {name: None})
        result = foreign.function(**arguments)
        assert result[0] is arguments[name]
        assert equal(list(result), expected)
    else:
        same = equal(results(foreign, foreign.arguments()), results(foreign, arguments))
        assert same is (outcome == NO_WEIGHT)


# ---------------------------------------------------------------------- what is wrong is named
def wrong_kinds(value: Any) -> list[Any]:
    """Values that no parameter takes; of a tensor, also its like of another kind."""
    wrong: list[Any] = ["text", object(), [object()], torch.ones(1, 1, 1, 1, 1, 1), 3 + 1j]
    if isinstance(value, Tensor):
        wrong += [value.to("meta"), value.to_sparse(), value.to(torch.complex64)]
    return wrong


def wrong_sizes(value: Any) -> list[Any]:
    """Tensors of a shape, or numbers, that do not fit the other arguments."""
    if not isinstance(value, Tensor) or not value.ndim:
        return []
    wrong = [value[0], value[:-1], value[..., :-1], value[:0], torch.cat((value, value))]
    if value.dtype is torch.int32:
        wrong += [value - 100, value.long(), value + 100_000]
    return wrong


def message_of(foreign: Foreign, arguments: Arguments) -> str | None:
    """What is wrong with a call; None: nothing. Another error than a refusal is the test's failure."""
    try:
        foreign.function(**arguments)
    except Refusal as error:
        return str(error)
    return None


def own_names_in(text: str, foreign: Foreign) -> set[str]:
    """Names of this library's arguments that the function has not. Advice may name other functions' ones."""
    text = re.sub(r"\bflash_attention\.[\w.]+(\([^)]*\))?|\b\w+\(|\bits mask_mod\b", "", text)
    there = inspect.signature(foreign.function).parameters
    return {name for name in OWN_NAMES - set(there) if re.search(rf"(?<![\w.]){name}(?!\w)", text)}


@pytest.mark.parametrize("title", FOREIGN)
def test_values_of_a_wrong_kind_are_named(title: str) -> None:
    foreign = FOREIGN[title]
    for name in inspect.signature(foreign.function).parameters:
        for wrong in wrong_kinds(foreign.arguments().get(name)):
            if name == "qkv" and isinstance(wrong, Tensor) and wrong.is_meta and "varlen" not in title:
                continue  # all tensors may be on meta
            text = message_of(foreign, {**foreign.arguments(), name: wrong})
            assert text is not None, (name, wrong)
            assert re.search(rf"\b{name}\b", text), (name, text)
            assert not own_names_in(text, foreign), (name, text)


@pytest.mark.parametrize("title", FOREIGN)
def test_errors_speak_of_the_functions_own_parameters(title: str) -> None:
    foreign = FOREIGN[title]
    there = inspect.signature(foreign.function).parameters
    for name in there:
        for wrong in wrong_sizes(foreign.arguments().get(name)):
            if text := message_of(foreign, {**foreign.arguments(), name: wrong}):
                assert not own_names_in(text, foreign), (name, text)
                assert any(re.search(rf"\b{known}\b", text) for known in there), (name, text)


# ---------------------------------------------------------------------- faults that were there
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("cu_seqlens_k_new", torch.tensor([0, 5, 22], dtype=torch.int32), None),
        ("cu_seqlens_k_new", torch.tensor([0, 5], dtype=torch.int32), "cu_seqlens_k_new has 2 entries"),
        ("rotary_seqlens", torch.tensor([3, 4], dtype=torch.int32), None),
        ("rotary_seqlens", torch.tensor([3, -4], dtype=torch.int32), "rotary_seqlens has -4"),
    ],
)
def test_what_says_nothing_in_a_call_is_checked_there(name: str, value: Tensor, words: str | None) -> None:
    """SGLang passes the first without k and v, flash-attn 3's own tests the second without tables."""
    left_out = ("k", "v", "rotary_cos", "rotary_sin", "cu_seqlens_k_new", "rotary_seqlens")
    arguments = FOREIGN["flash-attn 3: packed cache"].arguments()
    arguments = {name: x for name, x in arguments.items() if name not in left_out}
    if words is None:
        usual = flash_attn_3.flash_attn_with_kvcache(**arguments)
        assert torch.equal(flash_attn_3.flash_attn_with_kvcache(**arguments, **{name: value}), usual)
    else:
        with pytest.raises(ValueError, match=words):
            flash_attn_3.flash_attn_with_kvcache(**arguments, **{name: value})


def test_a_position_before_the_first_is_refused() -> None:
    arguments = FOREIGN["flash-attn 3: packed cache"].arguments()
    before = arguments["k_cache"].clone()
    arguments["rotary_seqlens"] = torch.tensor([0, -1], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^rotary_seqlens has -1; a count of positions is at least 0"):
        flash_attn_3.flash_attn_with_kvcache(**arguments)
    assert torch.equal(arguments["k_cache"], before)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda q: q[0], r"^out has shape \(4, 59\); the result has \(8, 4, 59\)"),
        (lambda q: q.half(), r"^out is torch\.float16; the result is torch\.bfloat16"),
        (lambda q: q, r"^out overlaps q in memory"),
        (lambda q: q[:1].clone().expand_as(q), r"^elements of out share memory"),
        (lambda q: q.to("meta"), r"^out is on meta"),
    ],
)
def test_an_output_of_odd_head_sizes_is_checked_before_anything_is_written(make: Any, words: str) -> None:
    arguments = FOREIGN["vLLM: odd head sizes"].arguments()
    out = arguments["out"] = make(arguments["q"])
    before = out.clone()
    with pytest.raises(Refusal, match=words):
        vllm.flash_attn_varlen_func(**arguments)
    assert out.is_meta or torch.equal(out, before)


def test_offsets_of_keys_in_pages_are_read() -> None:
    foreign = FOREIGN["flash-attn 2: varlen over pages"]
    for ends, words in (([5, 5, 5], "starts with 5"), ([0, 7, 3], "decreases by 4"), ([0, 3, 99], "has 96")):
        arguments = foreign.arguments() | {"cu_seqlens_k": torch.tensor(ends, dtype=torch.int32)}
        with pytest.raises(ValueError, match=rf"cu_seqlens_k {words}"):
            foreign.function(**arguments)


def test_what_plans_a_call_takes_what_flash_attn_3_takes_and_gives_nothing() -> None:
    counts = torch.ones(2, dtype=torch.int32)
    assert vllm.get_scheduler_metadata(2, 1, 48, 4, 2, 32, counts, page_size=16, causal=True) is None
    with pytest.raises(TypeError, match=r"^get_scheduler_metadata has no argument seqlens: "):
        flash_attn_3.get_scheduler_metadata(2, 1, 48, 4, 2, 32, counts, seqlens=counts)
    with pytest.raises(NotImplementedError, match=r"^sm_margin is 4"):
        flash_attn_3.get_scheduler_metadata(2, 1, 48, 4, 2, 32, counts, sm_margin=4)
