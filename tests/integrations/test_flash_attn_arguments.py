"""Every argument of flash-attn's functions with every kind of value: right, or refused by an error naming it.

The signatures are those of flash-attn 2.8. What is right comes from PyTorch's operations in float64.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flash_attention import flash_attn_interface as flash_attn

BATCH, N_Q, N_K, HEADS, HEADS_KV, D_HEAD = 2, 6, 11, 4, 2, 32
LENGTHS_Q, LENGTHS_K = (6, 2), (3, 11)  # of packed sequences
CAPACITY, PAGE, NEW = 48, 16, 3
Arguments = dict[str, Any]
Refused = (NotImplementedError, TypeError, ValueError)

COMMON = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
REQUIRED = inspect.Parameter.empty
PACKING = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), REQUIRED)
SIGNATURES: dict[str, Arguments] = {
    "flash_attn_func": dict.fromkeys("qkv", REQUIRED) | COMMON,
    "flash_attn_kvpacked_func": dict.fromkeys(("q", "kv"), REQUIRED) | COMMON,
    "flash_attn_qkvpacked_func": {"qkv": REQUIRED} | COMMON,
    "flash_attn_varlen_func": dict.fromkeys("qkv", REQUIRED) | PACKING | COMMON | {"block_table": None},
    "flash_attn_varlen_kvpacked_func": dict.fromkeys(("q", "kv"), REQUIRED) | PACKING | COMMON,
    "flash_attn_varlen_qkvpacked_func": dict.fromkeys(("qkv", "cu_seqlens", "max_seqlen"), REQUIRED) | COMMON,
    "flash_attn_with_kvcache": dict.fromkeys(("q", "k_cache", "v_cache"), REQUIRED)
    | {
        "k": None, "v": None, "rotary_cos": None, "rotary_sin": None, "cache_seqlens": None,
        "cache_batch_idx": None, "cache_leftpad": None, "block_table": None, "softmax_scale": None,
        "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True,
        "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False,
    },
}  # fmt: skip


def random(*shape: int, seed: int = 0) -> Tensor:
    """The same on every device."""
    generator = torch.Generator("cpu").manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, device="cpu").half().to(torch.get_default_device())


def base(function: str) -> Arguments:
    """Arguments that the function takes."""
    packed = "varlen" in function
    rows_q, rows_k = ((sum(LENGTHS_Q),), (sum(LENGTHS_K),)) if packed else ((BATCH, N_Q), (BATCH, N_K))
    q = random(*rows_q, HEADS, D_HEAD)
    k, v = random(*rows_k, HEADS_KV, D_HEAD, seed=1), random(*rows_k, HEADS_KV, D_HEAD, seed=2)
    ends_q, ends_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (LENGTHS_Q, LENGTHS_K))
    packing = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
    packing |= {"max_seqlen_q": max(LENGTHS_Q), "max_seqlen_k": max(LENGTHS_K)}
    if function == "flash_attn_with_kvcache":
        caches = {f"{x}_cache": random(BATCH, CAPACITY, HEADS_KV, D_HEAD, seed=i) for i, x in enumerate("kv")}
        new = {x: random(BATCH, NEW, HEADS_KV, D_HEAD, seed=i) for i, x in enumerate("kv")}
        return {"q": q, **caches, **new, "cache_seqlens": torch.tensor([5, 17]).int()}
    if "qkvpacked" in function:
        ends = {"cu_seqlens": ends_k, "max_seqlen": max(LENGTHS_K)} if packed else {}
        return {"qkv": torch.stack((k + 1, k, v), -3), **ends}
    tensors = {"q": q, "kv": torch.stack((k, v), -3)} if "kvpacked" in function else {"q": q, "k": k, "v": v}
    return {**tensors, **packing} if packed else tensors


def one(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """(seq, heads, d) in float64, by scores, mask and softmax: output, and lse (heads, seq)."""
    options = COMMON | {name: x for name, x in arguments.items() if name in COMMON}
    scale = options["softmax_scale"]
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if cap := float(options["softcap"]):
        scores = cap * (scores / cap).tanh()
    place = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))
    left, right = (int(side) for side in options["window_size"])
    hidden = torch.zeros(len(q), len(k), dtype=torch.bool)
    if options["causal"]:
        hidden |= key > place
    if left >= 0:
        hidden |= key < place - left
    if right >= 0:
        hidden |= key > place + right
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), v), scores.logsumexp(-1)


def expected(function: str, arguments: Arguments) -> Tensor:
    """The output, whatever form the inputs have."""
    given = dict(arguments)
    if "qkv" in given:
        given["q"], given["k"], given["v"] = given["qkv"].unbind(-3)
    elif "kv" in given:
        given["k"], given["v"] = given["kv"].unbind(-3)
    if "varlen" in function:
        ends = [given.get(name, given.get("cu_seqlens")) for name in ("cu_seqlens_q", "cu_seqlens_k")]
        sequences = [[slice(a, b) for a, b in zip(e.tolist(), e.tolist()[1:], strict=False)] for e in ends]
        pairs = zip(*sequences, strict=True)
        return torch.cat([one(given["q"][i], given["k"][j], given["v"][j], given)[0] for i, j in pairs])
    return torch.stack([one(*(given[x][b] for x in "qkv"), given)[0] for b in range(len(given["q"]))])


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, atol=3e-3, rtol=3e-3)


# ---------------------------------------------------------------------- signatures
@pytest.mark.parametrize("function", SIGNATURES)
def test_signatures_are_flash_attns(function: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, function)).parameters
    assert {name: p.default for name, p in parameters.items()} == SIGNATURES[function]
    assert list(parameters) == list(SIGNATURES[function])
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


def test_every_argument_is_walked() -> None:
    for function, signature in SIGNATURES.items():
        walked = {name for name in REFUSED if name in signature} | set(CACHE_REFUSED)
        served = {name for name, _ in SERVED} | {"alibi_slopes", "block_table"}
        assert set(signature) <= walked, function
        assert {name for name in COMMON} <= served


# ---------------------------------------------------------------------- values that are served
SERVED: list[tuple[str, Any]] = [
    ("dropout_p", 0), ("dropout_p", 0.0),
    ("softmax_scale", 0.3), ("softmax_scale", 0.0), ("softmax_scale", -0.5), ("softmax_scale", 1),
    ("softmax_scale", np.float32(0.25)), ("softmax_scale", None),
    ("causal", True), ("causal", 1), ("causal", np.True_),
    ("window_size", (2, 0)), ("window_size", [2, 1]), ("window_size", (-1, 1)), ("window_size", (0, -1)),
    ("window_size", (np.int64(3), -1)), ("window_size", np.array([3, -1])), ("window_size", (-5, -1)),
    ("softcap", 5.0), ("softcap", 0), ("softcap", 2),
    ("deterministic", True),
    ("return_attn_probs", True),
]  # fmt: skip
ATTENTION = [name for name in SIGNATURES if name != "flash_attn_with_kvcache"]


@pytest.mark.parametrize("function", ATTENTION)
@pytest.mark.parametrize(("name", "value"), SERVED, ids=lambda x: str(x))
def test_served_values_give_what_eager_steps_give(function: str, name: str, value: Any) -> None:
    arguments = {**base(function), name: value}
    got = getattr(flash_attn, function)(**arguments)
    if name == "return_attn_probs":
        got, lse, probs = got
        assert lse.dtype is torch.float32
        assert probs.numel() == 0
    close(got, expected(function, arguments))


@pytest.mark.parametrize("d_head", [12, 20])
@pytest.mark.parametrize("function", ATTENTION)
def test_head_sizes_that_are_padded(function: str, d_head: int) -> None:
    arguments = {
        n: x[..., :d_head] if isinstance(x, Tensor) and x.ndim > 2 else x for n, x in base(function).items()
    }
    close(getattr(flash_attn, function)(**arguments), expected(function, arguments))


# ---------------------------------------------------------------------- values that are refused
def changed(change: Callable[[Tensor], Any]) -> Callable[[Arguments, str], Any]:
    return lambda arguments, name: change(arguments[name])


def value(x: Any) -> Callable[[Arguments, str], Any]:
    return lambda arguments, name: x


TENSOR = [
    value(None), value([1.0]), changed(lambda x: x.float()), changed(lambda x: x.int()),
    changed(lambda x: x.to("meta")), changed(lambda x: x[0]),
    changed(lambda x: x.to_sparse()), changed(lambda x: x[..., :0]),
]  # fmt: skip
OFFSETS = [
    value(None), value([0, 3]), changed(lambda x: x.long()), changed(lambda x: x[None]),
    changed(lambda x: x.to("meta")), changed(lambda x: x.float()), changed(lambda x: x - 5),
    changed(lambda x: x[:0]),
]  # fmt: skip
LONGEST = [value(x) for x in (None, -1, 1.5, "9", torch.tensor(1.7), torch.tensor([9, 9]), True, 1)]
REFUSED: dict[str, list[Callable[[Arguments, str], Any]]] = {
    **dict.fromkeys(("q", "k", "v", "kv"), TENSOR),
    "qkv": [*TENSOR[:4], *TENSOR[5:]],  # all tensors may be on meta
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens"), OFFSETS),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "max_seqlen"), LONGEST),
    "dropout_p": [value(x) for x in (-0.1, 1.0, True, "0", torch.nan, torch.zeros(2))],
    "softmax_scale": [
        value(x) for x in (True, False, "1", torch.inf, torch.nan, 1j, torch.tensor(True), [1.0])
    ],
    "causal": [value(x) for x in ("yes", 2, None, 1.0, torch.tensor(True))],
    "window_size": [
        value(x)
        for x in (
            (-0.5, 0), {0: 1, 1: 2}, {1, 2}, (1,), (1, 2, 3), 5, None, "12", (True, 0), (None, 0), (0.0, 0),
            (torch.tensor(1.7), 0), torch.tensor([0.5, 1.0]), (1, "2"), (2, torch.tensor([1])),
        )
    ],
    "softcap": [value(x) for x in (True, False, -1.0, torch.nan, torch.inf, "5", None)],
    "alibi_slopes": [
        value(x)
        for x in (
            torch.ones(HEADS + 1), 0, False, torch.zeros(BATCH + 1, HEADS), torch.ones(HEADS).half(),
            torch.ones(()), [0.5] * HEADS, torch.ones(HEADS, device="meta"),
        )
    ],
    "deterministic": [value(x) for x in ("no", 2, None)],
    "return_attn_probs": [value(x) for x in ("no", 2, None)],
    "block_table": [value(x) for x in (torch.zeros(2, 1).int(), 0)],
}  # fmt: skip


CASES = [
    pytest.param(function, name, i, id=f"{function}-{name}-{i}")
    for function in ATTENTION
    for name in SIGNATURES[function]
    for i in range(len(REFUSED[name]))
]


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(("function", "name", "i"), CASES)
def test_refused_values_are_named(function: str, name: str, i: int) -> None:
    arguments = base(function)
    arguments[name] = REFUSED[name][i](arguments, name)
    with pytest.raises(Refused, match=rf"\b{name}\b"):
        getattr(flash_attn, function)(**arguments)


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_varlen_func"])
@pytest.mark.parametrize("compiled", [False, True])
def test_head_sizes_are_compared_before_they_are_padded(function: str, compiled: bool) -> None:
    arguments = base(function)
    arguments["q"], arguments["v"] = arguments["q"][..., :12], arguments["v"][..., :12]
    arguments["k"] = arguments["k"][..., :16]  # all three would be padded to 16
    call = getattr(flash_attn, function)
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager")
    with pytest.raises(Exception, match=r"q and k must have one head size; given q .*12\), k .*16\)"):
        call(**arguments)


@pytest.mark.parametrize("function", SIGNATURES)
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("is_causal", "its name here is causal"),
        ("scale", "its name here is softmax_scale"),
        ("window", "its name here is window_size"),
        ("query", "its name here is q"),
        ("attn_mask", "flash_attention.mods.dense_mask"),
        ("return_lse", "its name here is return_"),
        ("out", "write into a tensor"),
        ("s_aux", "attention_varlen(…, sinks=…) take sinks"),
    ],
)
def test_unknown_keywords_are_named(function: str, name: str, advice: str) -> None:
    if name == "query" and "qkv" in SIGNATURES[function]:
        advice = "none of its own"
    parts = "|".join(map(re.escape, advice.split("|")))
    with pytest.raises(TypeError, match=rf"^{function} has no argument {name}: .*({parts})"):
        getattr(flash_attn, function)(**base(function), **{name: 1})


# ---------------------------------------------------------------------- the cache
def tables() -> Arguments:
    angles = torch.arange(CAPACITY)[:, None] * 10.0 ** -torch.arange(8)
    return {"rotary_cos": angles.cos().half(), "rotary_sin": angles.sin().half()}


def paged(arguments: Arguments) -> Arguments:
    n_pages = CAPACITY // PAGE
    caches = {n: arguments[n].view(-1, PAGE, HEADS_KV, D_HEAD) for n in ("k_cache", "v_cache")}
    return {**arguments, **caches, "block_table": torch.arange(BATCH * n_pages).int().view(BATCH, n_pages)}


NEW_TENSOR = [
    value([1.0]), changed(lambda x: x.to("meta")), changed(lambda x: x.float()),
    changed(lambda x: x[..., :9]), changed(lambda x: x[..., :0]), changed(lambda x: x[:, :, :1]),
    changed(lambda x: x[:1]), changed(lambda x: x[0]), changed(lambda x: x.clone().requires_grad_()),
    changed(lambda x: x[:, :1]), value(None),
    lambda arguments, name: arguments[f"{name}_cache"][:, :NEW],
]  # fmt: skip
CACHE = [
    value(None), changed(lambda x: x.to("meta")), changed(lambda x: x.float()),
    changed(lambda x: x[..., :9]), changed(lambda x: x[..., :0]), changed(lambda x: x[:1]),
    changed(lambda x: x[0]),
    changed(lambda x: x[:1].expand(BATCH, -1, -1, -1)),
]  # fmt: skip
ROTARY = [
    value(None), value(0.5), changed(lambda x: x.long()), changed(lambda x: x.bool()),
    changed(lambda x: x.double()), changed(lambda x: x.to("meta")), changed(lambda x: x[:5]),
    changed(lambda x: x[0]), changed(lambda x: x[:, :3]),
]  # fmt: skip
CACHE_REFUSED: dict[str, list[Callable[[Arguments, str], Any]]] = {
    "q": [
        *TENSOR,
        changed(lambda x: x.clone().requires_grad_()),
        lambda a, name: a["k_cache"].view(-1)[: a["q"].numel()].view_as(a["q"]),
    ],
    "k_cache": CACHE,
    "v_cache": [*CACHE, lambda a, name: a["k_cache"]],
    "k": NEW_TENSOR,
    "v": [*NEW_TENSOR, lambda a, name: a["k_cache"][:, :NEW]],
    "rotary_cos": ROTARY,
    "rotary_sin": ROTARY,
    "cache_seqlens": [
        value(x)
        for x in (
            None, -1, True, 1.5, 2**31, [3, 4], torch.tensor([3, 4]), torch.tensor([3]).int(),
            torch.tensor([3, -1]).int(), torch.tensor([3, 46]).int(), torch.tensor([3.0, 4.0]),
            torch.tensor([3, 4]).int().to("meta"),
        )
    ] + [lambda a, name: a["k_cache"].view(torch.int32).view(-1)[:2]],
    "cache_batch_idx": [
        value(x)
        for x in (
            [0, 1], torch.tensor([0]), torch.tensor([0.0, 1.0]), torch.tensor([0, 2]), torch.tensor([1, 1]),
            torch.tensor([-1, 0]), torch.tensor([0, 1]).to("meta"), torch.tensor([0, 2**32]),
        )
    ],
    "block_table": [
        value(x)
        for x in (
            [[0]], torch.zeros(2, 3), torch.zeros(1, 3).int(), torch.zeros(6).int(),
            torch.full((2, 3), 9).int(), torch.full((2, 3), -1).int(), torch.zeros(2, 3).int().to("meta"),
            torch.zeros(2, 3).long(),
        )
    ],
    "cache_leftpad": [
        value(x) for x in (0, torch.zeros(3).int(), torch.zeros(2), torch.zeros(2).int() - 1)
    ],
    "num_splits": [value(x) for x in (257, 1.0, False, "0", -1)],
    "rotary_interleaved": [value(x) for x in ("no", 2, None)],
    "return_softmax_lse": [value(x) for x in ("no", 2, None)],
    **{name: REFUSED[name] for name in ("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes")},
}  # fmt: skip
CACHE_CASES = [
    pytest.param(name, i, id=f"{name}-{i}") for name in CACHE_REFUSED for i in range(len(CACHE_REFUSED[name]))
]


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(("name", "i"), CACHE_CASES)
def test_the_cache_is_untouched_by_what_is_refused(name: str, i: int) -> None:
    arguments = {**base("flash_attn_with_kvcache"), **tables()}
    if name == "block_table":
        arguments = paged(arguments)
    caches = [arguments[n] for n in ("k_cache", "v_cache")]
    before = [cache.clone() for cache in caches]
    arguments[name] = CACHE_REFUSED[name][i](arguments, name)
    with pytest.raises(Refused, match=rf"\b{name}\b"):
        flash_attn.flash_attn_with_kvcache(**arguments)
    for cache, kept in zip(caches, before, strict=True):
        assert torch.equal(cache, kept)


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(
    "sizes", [(12, 16, 12, 12, 12), (12, 12, 12, 12, 9), (12, 12, 12, 16, 12), (12, 12, 16, 12, 12)]
)
def test_padding_hides_no_head_size_of_the_cache(sizes: tuple[int, ...]) -> None:
    arguments = base("flash_attn_with_kvcache")
    names = ("q", "k_cache", "v_cache", "k", "v")
    for name, d in zip(names, sizes, strict=True):
        arguments[name] = arguments[name][..., :d].contiguous()
    before = {name: arguments[name].clone() for name in names}
    with pytest.raises(ValueError, match=r"\b[kv](_cache)?\b"):
        flash_attn.flash_attn_with_kvcache(**arguments)
    assert all(torch.equal(arguments[name], before[name]) for name in names)


@pytest.mark.only_on("cpu")
def test_overlapping_caches_of_a_padded_head_size_are_refused() -> None:
    arguments = base("flash_attn_with_kvcache")
    both = random(BATCH, CAPACITY, HEADS_KV, 20)
    arguments |= {"k_cache": both[..., :12], "v_cache": both[..., 8:]}
    for name in ("q", "k", "v"):
        arguments[name] = arguments[name][..., :12]
    before = both.clone()
    with pytest.raises(ValueError, match="k_cache and v_cache overlap"):
        flash_attn.flash_attn_with_kvcache(**arguments)
    assert torch.equal(both, before)


def bad_counts(arguments: Arguments) -> Arguments:
    return {**arguments, "cache_seqlens": torch.tensor([CAPACITY, 1]).int()}


def bad_items(arguments: Arguments) -> Arguments:
    return {**arguments, "cache_batch_idx": torch.tensor([0, -1])}


def bad_pages(arguments: Arguments) -> Arguments:
    given = paged(arguments)
    return {**given, "block_table": given["block_table"] + 100}


def bad_positions(arguments: Arguments) -> Arguments:
    return {**arguments, **{name: table[:NEW] for name, table in tables().items()}}


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (bad_counts, "cache_seqlens has a count"),
        (bad_items, "cache_batch_idx names an item"),
        (bad_pages, "the table of pages names a page"),
        (bad_positions, "rotary_cos and rotary_sin have fewer rows"),
    ],
)
def test_a_compiled_program_names_what_is_wrong_with_its_numbers(
    spoil: Callable[[Arguments], Arguments], name: str
) -> None:
    """On the CPU, where an index beyond the cache would say less; the caches stay as they are."""
    torch._dynamo.reset()
    call = torch.compile(lambda **given: flash_attn.flash_attn_with_kvcache(**given), backend="aot_eager")
    arguments = spoil(base("flash_attn_with_kvcache"))
    before = [arguments[cache].clone() for cache in ("k_cache", "v_cache")]
    with pytest.raises(RuntimeError, match=name):
        call(**arguments)
    assert all(torch.equal(arguments[n], x) for n, x in zip(("k_cache", "v_cache"), before, strict=True))


@pytest.mark.only_on("cpu")
def test_one_tensor_for_both_caches_is_refused_in_a_trace_too() -> None:
    """Nobody knows addresses there; v would be written over k."""
    arguments = base("flash_attn_with_kvcache")
    arguments["v_cache"] = arguments["k_cache"]
    before = arguments["k_cache"].clone()

    def call(**given: Any) -> Any:
        return flash_attn.flash_attn_with_kvcache(**given)

    for run in (call, torch.compile(call, fullgraph=True, backend="eager")):
        with pytest.raises(Exception, match="k_cache and v_cache overlap"):
            run(**arguments)
    assert torch.equal(arguments["k_cache"], before)


@pytest.mark.only_on("cpu")
def test_messages_about_the_cache_use_the_names_of_the_call() -> None:
    """``k`` is what is appended."""
    arguments = base("flash_attn_with_kvcache")
    with pytest.raises(ValueError, match=r"^q and k_cache must have one head size; given .*, k_cache \("):
        flash_attn.flash_attn_with_kvcache(**arguments | {"q": arguments["q"][..., :8]})
    three_heads = arguments["q"][:, :, :1].repeat(1, 1, 3, 1)
    with pytest.raises(ValueError, match=r"^q has 3 heads and k_cache and v_cache have 2; "):
        flash_attn.flash_attn_with_kvcache(**arguments | {"q": three_heads})


CACHE_SERVED: list[tuple[str, Any]] = [
    ("cache_seqlens", 5), ("cache_seqlens", torch.tensor([0, 45]).int()), ("k", None), ("causal", True),
    ("window_size", (4, 0)), ("softcap", 3.0), ("softmax_scale", 0.3), ("num_splits", 0),
    ("return_softmax_lse", True), ("cache_batch_idx", torch.tensor([1, 0])), ("block_table", None),
    ("d_head", 12), ("d_head", 20),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given"), CACHE_SERVED, ids=str)
@pytest.mark.parametrize("pages", [False, True])
def test_the_cache_call_gives_what_eager_steps_give(name: str, given: Any, pages: bool) -> None:
    arguments = base("flash_attn_with_kvcache")
    if isinstance(given, Tensor):
        given = given.to(arguments["q"].device)
    if name == "d_head":
        arguments = {n: x[..., :given].contiguous() if x.ndim == 4 else x for n, x in arguments.items()}
    elif name == "k":
        del arguments["k"], arguments["v"]
    else:
        arguments[name] = given
    counts = arguments["cache_seqlens"]
    counts = [counts] * BATCH if isinstance(counts, int) else counts.tolist()
    items = [0, 1] if arguments.get("cache_batch_idx") is None else arguments["cache_batch_idx"].tolist()
    options = {n: x for n, x in arguments.items() if n in COMMON}
    wanted = []
    for b, n in enumerate(counts):
        keys, values = (arguments[f"{x}_cache"][items[b], :n] for x in "kv")
        if "k" in arguments:
            keys, values = torch.cat((keys, arguments["k"][b])), torch.cat((values, arguments["v"][b]))
        wanted.append(one(arguments["q"][b], keys, values, options)[0])
    if pages:
        if name in ("cache_batch_idx", "d_head"):
            pytest.skip("pages exclude cache_batch_idx; head sizes are walked without pages")
        arguments = paged(arguments)
    got = flash_attn.flash_attn_with_kvcache(**arguments)
    close(got[0] if isinstance(got, tuple) else got, torch.stack(wanted))
