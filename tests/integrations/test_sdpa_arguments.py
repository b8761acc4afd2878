"""Every argument of ``sdpa`` with every kind of value: what PyTorch's math gives, or an error naming it."""

from __future__ import annotations

import inspect
import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

from flash_attention import sdpa

BATCH, HEADS, D_HEAD = 2, 4, 32
Arguments = dict[str, Any]
Refused = (NotImplementedError, TypeError, ValueError)


def random(*shape: int) -> Tensor:
    """The same on every device."""
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cpu").bfloat16().to(torch.get_default_device())


def tensors(seq_len_q: int = 20, seq_len_k: int = 20, heads_kv: int = HEADS) -> Arguments:
    return {
        "query": random(BATCH, HEADS, seq_len_q, D_HEAD),
        "key": random(BATCH, heads_kv, seq_len_k, D_HEAD),
        "value": random(BATCH, heads_kv, seq_len_k, D_HEAD) + 1,
    }


def math(arguments: Arguments) -> Tensor:
    """PyTorch's own steps in float64; its causal masks as tensors."""
    given = {
        n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in arguments.items()
    }
    if hasattr(mask := arguments.get("attn_mask"), "_materialize"):
        given["attn_mask"] = mask._materialize(arguments["query"].device)
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(**given)


def bias(make: Callable[[int, int], Any], seq_len_q: int, seq_len_k: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's rows without keys are NaN
        return make(seq_len_q, seq_len_k)


# Each row: the argument, its value, and whether it is served. Lengths differ where alignment shows.
LENGTHS = [(20, 20), (7, 20), (20, 7), (1, 20)]
SERVED: list[tuple[str, Callable[[], Arguments]]] = [
    ("is_causal", lambda: {"is_causal": True}),
    ("is_causal", lambda: {"is_causal": False}),
    ("scale", lambda: {"scale": 0.3}),
    ("scale", lambda: {"scale": 0.0}),
    ("scale", lambda: {"scale": -0.5}),
    ("scale", lambda: {"scale": 1}),
    ("scale", lambda: {"scale": None}),
    ("dropout_p", lambda: {"dropout_p": 0.0}),
    ("attn_mask", lambda: {"attn_mask": None}),
    ("enable_gqa", lambda: {"enable_gqa": True}),
    ("enable_gqa", lambda: {"enable_gqa": False}),
]
REFUSED: list[tuple[str, Callable[[], Arguments]]] = [
    ("attn_mask", lambda: {"attn_mask": torch.ones(20, 20, dtype=torch.bool), "is_causal": True}),
    ("attn_mask", lambda: {"attn_mask": torch.ones(20, 19, dtype=torch.bool)}),
    ("attn_mask", lambda: {"attn_mask": torch.ones(20, dtype=torch.bool)}),
    ("attn_mask", lambda: {"attn_mask": torch.zeros(1, BATCH, HEADS, 20, 20)}),
    ("attn_mask", lambda: {"attn_mask": torch.zeros(HEADS, BATCH, 20, 20)}),
    ("attn_mask", lambda: {"attn_mask": torch.zeros(20, 20, dtype=torch.int32)}),
    ("attn_mask", lambda: {"attn_mask": torch.zeros(20, 20, dtype=torch.float64)}),
    ("attn_mask", lambda: {"attn_mask": torch.zeros(20, 20, device="meta")}),
    ("attn_mask", lambda: {"attn_mask": "causal"}),
    ("attn_mask", lambda: {"attn_mask": causal_lower_right(20, 21)}),
    ("attn_mask", lambda: {"attn_mask": causal_upper_left(20, 20), "is_causal": True}),
    ("dropout_p", lambda: {"dropout_p": -0.1}),
    ("dropout_p", lambda: {"dropout_p": True}),
    ("dropout_p", lambda: {"dropout_p": torch.nan}),
    ("is_causal", lambda: {"is_causal": "yes"}),
    ("is_causal", lambda: {"is_causal": 2}),
    ("is_causal", lambda: {"is_causal": None}),
    ("is_causal", lambda: {"is_causal": torch.tensor(True)}),
    ("scale", lambda: {"scale": True}),
    ("scale", lambda: {"scale": torch.tensor(True)}),
    ("scale", lambda: {"scale": "0.5"}),
    ("scale", lambda: {"scale": torch.inf}),
    ("scale", lambda: {"scale": torch.nan}),
    ("scale", lambda: {"scale": torch.ones(2)}),
    ("scale", lambda: {"scale": 1j}),
    ("enable_gqa", lambda: {"enable_gqa": "no"}),
    ("query", lambda: {"query": None}),
    ("query", lambda: {"query": random(BATCH, HEADS, 20, D_HEAD).float()}),
    ("query", lambda: {"query": random(BATCH, HEADS, 20, 16)}),
    ("query", lambda: {"query": random(BATCH + 1, HEADS, 20, D_HEAD)}),
    ("query", lambda: {"query": random(BATCH, HEADS, 20, D_HEAD).to("meta")}),
    ("key", lambda: {"key": [1.0]}),
    ("key", lambda: {"key": random(BATCH, HEADS, 19, D_HEAD)}),
    ("key", lambda: {"key": random(BATCH, HEADS // 2, 20, D_HEAD)}),
    ("key", lambda: {"key": random(BATCH, HEADS, 20, D_HEAD).half()}),
    ("key", lambda: {"key": random(BATCH, HEADS, 20, D_HEAD).to("meta")}),
    ("value", lambda: {"value": random(BATCH, HEADS, 21, D_HEAD)}),
    ("value", lambda: {"value": random(BATCH, HEADS, 25, D_HEAD), "is_causal": True}),
    ("value", lambda: {"value": random(BATCH, HEADS, 20, 12)}),
    ("value", lambda: {"value": random(BATCH, HEADS, 20, 264)}),
    ("value", lambda: {"value": random(HEADS, 20, D_HEAD)}),
    ("value", lambda: {"value": random(BATCH, HEADS, 20, D_HEAD).int()}),
]  # fmt: skip


def ids(rows: list[tuple[str, Any]]) -> list[str]:
    return [f"{name}-{i}" for i, (name, _) in enumerate(rows)]


def test_every_argument_is_walked() -> None:
    names = set(inspect.signature(sdpa).parameters)
    assert {name for name, _ in REFUSED} == names
    assert {name for name, _ in SERVED} | {"query", "key", "value"} == names


@pytest.mark.parametrize(("seq_len_q", "seq_len_k"), LENGTHS)
@pytest.mark.parametrize(("name", "change"), SERVED, ids=ids(SERVED))
def test_served_values_give_what_pytorchs_math_gives(
    name: str, change: Callable[[], Arguments], seq_len_q: int, seq_len_k: int
) -> None:
    arguments = {**tensors(seq_len_q, seq_len_k), **change()}
    torch.testing.assert_close(sdpa(**arguments).double(), math(arguments), atol=1.6e-2, rtol=1.6e-2)


@pytest.mark.parametrize(("seq_len_q", "seq_len_k"), LENGTHS)
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_biases_give_what_pytorchs_math_gives(make: Any, seq_len_q: int, seq_len_k: int) -> None:
    arguments = {**tensors(seq_len_q, seq_len_k), "attn_mask": bias(make, seq_len_q, seq_len_k), "scale": 0.3}
    expected = math(arguments).nan_to_num(0.0)  # a query without keys
    torch.testing.assert_close(sdpa(**arguments).double(), expected, atol=1.6e-2, rtol=1.6e-2)


def masks(seq_len_q: int, seq_len_k: int) -> list[Tensor]:
    """Masks of every shape that broadcasts. Some of them hide all keys of a query."""
    sizes = (BATCH, HEADS, seq_len_q, seq_len_k)
    shapes = [
        [size if kept else 1 for size, kept in zip(sizes, bits, strict=True)]
        for bits in itertools.product((False, True), repeat=4)
    ]
    shapes += [shape[-2:] for shape in shapes[:4]] + [shape[-3:] for shape in shapes[:8]]
    made = [random(*shape) for shape in shapes]
    made += [random(*shape).float().masked_fill(random(*shape) > 0.3, -torch.inf) for shape in shapes]
    return made + [random(*shape) < 0.3 for shape in shapes]


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(("seq_len_q", "seq_len_k"), LENGTHS)
def test_mask_tensors_give_what_pytorchs_math_gives(seq_len_q: int, seq_len_k: int) -> None:
    for mask in masks(seq_len_q, seq_len_k):
        arguments = {**tensors(seq_len_q, seq_len_k), "attn_mask": mask}
        expected = math(arguments).nan_to_num(0.0)  # scores of -inf alone
        torch.testing.assert_close(sdpa(**arguments).double(), expected, atol=1.6e-2, rtol=1.6e-2)


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(
    "shape", [(20, 20), (HEADS, 1, 20), (2, 1, 1, 20), (3, 1, HEADS, 20, 1), (1, 2, 1, 20, 20)]
)
def test_masks_of_several_dimensions_before_the_heads(shape: tuple[int, ...]) -> None:
    arguments = {name: torch.stack([torch.stack([x[i % 2] + i for i in (j, j + 1)]) for j in range(3)])
                 for name, x in tensors().items()}  # fmt: skip
    for mask in (random(*shape), random(*shape) < 0.3):
        given = {**arguments, "attn_mask": mask}
        torch.testing.assert_close(sdpa(**given).double(), math(given).nan_to_num(0.0), atol=3e-2, rtol=3e-2)


@pytest.mark.only_on("cpu")
def test_masks_without_heads() -> None:
    three = {name: x[0] for name, x in tensors().items()}
    for mask in (random(20, 20), random(HEADS, 20, 1) > 0):
        given = {**three, "attn_mask": mask}
        torch.testing.assert_close(
            sdpa(**given).double(), math(given).nan_to_num(0.0), atol=1.6e-2, rtol=1.6e-2
        )
    two = {name: x[0, 0] for name, x in tensors().items()} | {"attn_mask": random(1, 20) > 0}
    torch.testing.assert_close(sdpa(**two).double(), math(two).nan_to_num(0.0), atol=1.6e-2, rtol=1.6e-2)


@pytest.mark.only_on("cpu")
def test_the_smallest_number_hides_no_more_than_pytorch_does() -> None:
    """Where it is added to all scores of a query, all of its keys are seen alike."""
    mask = torch.zeros(20, 20).masked_fill(torch.ones(20, 20).triu(1) > 0, torch.finfo(torch.float32).min)
    mask[3] = torch.finfo(torch.float32).min
    arguments = {**tensors(), "attn_mask": mask}
    torch.testing.assert_close(sdpa(**arguments).double(), math_float(arguments), atol=1.6e-2, rtol=1.6e-2)


def math_float(arguments: Arguments) -> Tensor:
    """As ``math``, with scores in float32, in which the smallest number plus a score is that number."""
    query, key, value = (arguments[name].float() for name in ("query", "key", "value"))
    scores = query @ key.mT * D_HEAD**-0.5 + arguments["attn_mask"]
    return (torch.softmax(scores, -1) @ value).double()


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_shared_heads_give_what_pytorchs_math_gives(heads_kv: int) -> None:
    arguments = {**tensors(heads_kv=heads_kv), "enable_gqa": True, "is_causal": True}
    torch.testing.assert_close(sdpa(**arguments).double(), math(arguments), atol=1.6e-2, rtol=1.6e-2)


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(("name", "change"), REFUSED, ids=ids(REFUSED))
def test_refused_values_are_named(name: str, change: Callable[[], Arguments]) -> None:
    with pytest.raises(Refused, match=rf"\b{name}\b"):
        sdpa(**{**tensors(), **change()})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("causal", "its name here is is_causal"),
        ("softmax_scale", "its name here is scale"),
        ("q", "its name here is query"),
        ("window", "attention(…, window=…)"),
        ("attention_mask", "attention_varlen takes"),
        ("nonsense", "none of its own"),
    ],
)
def test_unknown_keywords_are_named(name: str, advice: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^sdpa has no argument {name}: .*{re.escape(advice)}.*It takes query, "
    ):
        sdpa(**{**tensors(), name: 1})


def test_heads_behind_the_lengths_are_seen_where_they_do_not_fit() -> None:
    swapped = {name: x.transpose(1, 2) for name, x in tensors(20, 30).items()}
    with pytest.raises(ValueError, match=r"look like \(batch, seq, heads, d\): pass query.transpose\(1, 2\)"):
        sdpa(**swapped)
    with pytest.raises(ValueError, match=r"query has 4 heads, key 2; .*enable_gqa=True$"):
        sdpa(**tensors(20, 30, heads_kv=2))
