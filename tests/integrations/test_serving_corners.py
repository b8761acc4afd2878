"""Corners of the calls by servers' names: batches without a sequence, and what is said of a wrong call."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flash_attention import attention_varlen
from flash_attention import flash_attn_interface as flash_attn_2
from flash_attention.cached import attention_cached
from flash_attention.compat import kv_cache_checks, packed_cache, packed_cache_checks
from flash_attention.compat.words import in_words
from flash_attention.errors import NoKernelError
from flash_attention.integrations import flash_attn_3, vllm
from flash_helpers.test.reference import reference

BF, INT = torch.bfloat16, torch.int32
HEADS, HEADS_KV, D, PAGE = 4, 2, 32, 16


def random(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=INT)


@pytest.mark.parametrize("rotary", [False, True], ids=["", "rotary"])
@pytest.mark.parametrize("pages", [0, 3])
def test_rows_behind_no_sequence_are_padding(pages: int, rotary: bool) -> None:
    """A batch of no sequence: all rows of q, k and v are behind the last end, and nothing is appended."""
    caches = random(pages, PAGE, HEADS_KV, D), random(pages, PAGE, HEADS_KV, D)
    before = [x.clone() for x in caches]
    angles = {"rotary_cos": random(40, 8), "rotary_sin": random(40, 8)} if rotary else {}
    out, lse = flash_attn_3.flash_attn_with_kvcache(
        random(3, HEADS, D), *caches, random(2, HEADS_KV, D), random(2, HEADS_KV, D), cache_seqlens=ints(),
        page_table=torch.zeros(0, 4, dtype=INT), cu_seqlens_q=ints(0), cu_seqlens_k_new=ints(0),
        max_seqlen_q=0, causal=True, return_softmax_lse=True, **angles,
    )  # fmt: skip
    assert torch.equal(out, torch.zeros(3, HEADS, D, dtype=BF))
    assert torch.equal(lse, torch.full((HEADS, 3), -math.inf))
    assert all(map(torch.equal, caches, before))


@pytest.mark.parametrize("leftpad", [False, True], ids=["", "leftpad"])
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_caches_without_a_row_take_padding_rows(paged: bool, leftpad: bool) -> None:
    cache = random(*((0, PAGE) if paged else (2, 0)), HEADS_KV, D)
    out = flash_attn_3.flash_attn_with_kvcache(
        random(2, HEADS, D), cache, cache.clone(), random(2, HEADS_KV, D), random(2, HEADS_KV, D),
        cache_seqlens=ints(0, 0), page_table=torch.full((2, 4), -1, dtype=INT) if paged else None,
        cache_leftpad=ints(0, 0) if leftpad else None, cu_seqlens_q=ints(0, 1, 2),
        cu_seqlens_k_new=ints(0, 0, 0), max_seqlen_q=1, causal=True,
    )  # fmt: skip
    assert torch.equal(out, torch.zeros(2, HEADS, D, dtype=BF))


@pytest.mark.parametrize("axis", [0, 1], ids=["item", "row"])
def test_one_item_or_row_has_any_stride_beside_padding_on_the_left(axis: int) -> None:
    """Of one entry, an axis' stride says nothing of where rows lie."""
    size = [3, 8]
    size[axis] = 1
    cache = random(*size, HEADS_KV, D)
    strides = list(cache.stride())
    strides[axis] += 5 * D
    odd = torch.as_strided(cache, cache.shape, strides)
    queries, n = random(size[0], 1, HEADS, D), size[1]
    options = {"cache_seqlens": n, "cache_leftpad": ints(*[min(2, n - 1)] * size[0])}
    expected = flash_attn_3.flash_attn_with_kvcache(queries, cache, cache, **options)
    assert torch.equal(flash_attn_3.flash_attn_with_kvcache(queries, odd, odd, **options), expected)


@pytest.mark.parametrize("paged", [False, True], ids=["cache", "pages"])
def test_offsets_of_keys_beside_a_cache_are_what_is_wrong(paged: bool) -> None:
    ends, keys = ints(0, 2, 3), random(2, 32, HEADS_KV, D)
    table = torch.zeros(2, 1, dtype=INT) if paged else None
    with pytest.raises(
        ValueError, match=r"given q .*; k and v look like a cache, or pages: pass cu_seqlens_k=None, and"
    ):
        attention_varlen(
            random(3, HEADS, D), keys, keys, ends, ends, 2, 32, seqused_k=ints(5, 9), block_table=table
        )


@pytest.mark.parametrize(
    ("call", "keyword", "advice"),
    [
        (flash_attn_3.flash_attn_varlen_func, "n_splits", "its name here is num_splits"),
        (flash_attn_3.flash_attn_with_kvcache, "numerics", "flash_attention.attention and attention_varlen("),
        (vllm.flash_attn_varlen_func, "numerics", "flash_attention.attention and attention_varlen("),
        (flash_attn_3.flash_attn_with_kvcache, "s_aux", "attention_varlen(…, sinks=…) take sinks"),
        (flash_attn_3.flash_attn_varlen_func, "out", "attention_varlen(…, out=…) write into a tensor"),
        (vllm.flash_attn_varlen_func, "attention_chunk", "integrations.flash_attn_3 take it"),
        (vllm.flash_attn_varlen_func, "cache_batch_idx", "flash_attn_3.flash_attn_with_kvcache takes it"),
    ],
)
def test_a_keyword_of_another_function_is_named(call: Any, keyword: str, advice: str) -> None:
    with pytest.raises(TypeError) as raised:
        call(**{keyword: None})
    assert f"has no argument {keyword}: " in str(raised.value)
    assert advice in str(raised.value)


def test_heads_of_a_group_are_packed_by_none_too() -> None:
    x = random(1, 4, HEADS, D)
    with pytest.raises(
        TypeError, match="pack_gqa is 'yes'; it must be True or False, or None: it changes no"
    ):
        flash_attn_3.flash_attn_func(x, x, x, pack_gqa="yes")  # type: ignore[arg-type]


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("d", [D, 59])
def test_an_output_in_the_place_of_slopes_is_refused(d: int) -> None:
    rows, ends = [random(3, heads, d) for heads in (HEADS, HEADS_KV, HEADS_KV)], ints(0, 2, 3)
    slopes = torch.zeros(3 * HEADS * d)[:HEADS]
    out = torch.as_strided(slopes.view(BF), (3, HEADS, d), (HEADS * d, d, 1))
    with pytest.raises(ValueError, match=r"^out overlaps alibi_slopes in memory"):
        vllm.flash_attn_varlen_func(*rows, 2, ends, 2, ends, alibi_slopes=slopes, out=out)


@pytest.mark.parametrize("given", ["q", "k", "v"])
def test_scales_of_8_bit_types_are_refused_with_such_tensors(given: str) -> None:
    """Beside 16 bits they say nothing (``foreign_calls.IDLE_SCALES``): vLLM passes them in every call."""
    rows = {"q": random(3, HEADS, D), "k": random(3, HEADS_KV, D), "v": random(3, HEADS_KV, D)}
    rows[given] = rows[given].to(torch.float8_e4m3fn)
    scales = torch.ones(1).expand(2, HEADS_KV)
    ends = {"cu_seqlens_q": ints(0, 2, 3), "cu_seqlens_k": ints(0, 2, 3)}
    with pytest.raises(NotImplementedError, match=r"k_descale is .*has no such feature"):
        vllm.flash_attn_varlen_func(**rows, **ends, max_seqlen_q=2, max_seqlen_k=2, k_descale=scales)


@pytest.mark.parametrize("appended", [False, True], ids=["", "appended"])
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize(("wrong", "dtype"), [(-1, INT), (-1, torch.int64), (2**32, torch.int64), (3, INT)])
@pytest.mark.only_on("cpu")  # on a GPU it is an error of the device
def test_an_item_that_is_not_there_is_no_other_one(
    wrong: int, dtype: torch.dtype, paged: bool, appended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody reads the items before the launch, as on a GPU."""
    for module in (kv_cache_checks, packed_cache, packed_cache_checks):
        monkeypatch.setattr(module, "is_readable", lambda x: False)
    caches = random(3, PAGE, HEADS_KV, D), random(3, PAGE, HEADS_KV, D)
    before = [x.clone() for x in caches]
    new = [random(2, 1, HEADS_KV, D)] * 2 if appended else []
    with pytest.raises((IndexError, ValueError)):
        flash_attn_3.flash_attn_with_kvcache(
            random(2, 1, HEADS, D), *caches, *new, cache_seqlens=ints(3, 4),
            cache_batch_idx=torch.tensor([1, wrong], dtype=dtype),
            page_table=torch.arange(3, dtype=INT)[:, None] if paged else None,
        )  # fmt: skip
    assert all(map(torch.equal, caches, before))


@pytest.mark.parametrize("leftpad", [False, True], ids=["", "leftpad"])
@pytest.mark.parametrize("appended", [False, True], ids=["", "appended"])
def test_a_call_that_no_kernel_computes_writes_nothing(
    appended: bool, leftpad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU refuses functions of packed queries over a cache, whose kernel is asked for before."""
    asked = []

    def none(*tensors: Tensor, **options: Any) -> Any:
        asked.append(options)
        raise NoKernelError("kernels take no score_mod and no mask_mod")

    monkeypatch.setattr(packed_cache, "explain_choice", none)
    caches = random(2, PAGE, HEADS_KV, D), random(2, PAGE, HEADS_KV, D)
    before = [x.clone() for x in caches]
    new = [random(2, 3, HEADS_KV, D)] * 2 if appended else []
    pad = ints(1, 0) if leftpad else None

    def call(**options: Any) -> Any:
        return flash_attn_3.flash_attn_with_kvcache(
            random(2, 1, HEADS, D), *caches, *new, cache_seqlens=ints(3, 4), cache_leftpad=pad, **options
        )

    if not appended:
        call(attention_chunk=2)
        assert not asked  # nothing would be written, and the call itself refuses
        return
    with pytest.raises(NoKernelError, match=r"^kernels take no attention_chunk$"):
        call(attention_chunk=2)
    assert all(map(torch.equal, caches, before))
    (options,) = asked
    assert options["seqused_k"].tolist() == ([5, 7] if leftpad else [6, 7])
    call()
    assert not any(map(torch.equal, caches, before))
    assert len(asked) == 1  # what has a kernel everywhere is not asked for


@pytest.mark.parametrize("paged", [False, True], ids=["cache", "pages"])
def test_a_refused_gradient_says_what_has_one(paged: bool) -> None:
    q, ends = random(3, HEADS, D).requires_grad_(), ints(0, 2, 3)
    keys, counts = random(2, PAGE, HEADS_KV, D), [5, 9]
    table = ints(0, 1)[:, None] if paged else None
    asked = "seqused_k and block_table" if paged else "seqused_k"
    words = rf"packed queries with {asked} have none: .* with cu_seqlens_q and cu_seqlens_k alone$"
    with pytest.raises(NotImplementedError, match=words):
        attention_varlen(q, keys, keys, ends, None, 2, PAGE, seqused_k=ints(*counts), block_table=table)
    packed = torch.cat([keys[i, :n] for i, n in enumerate(counts)])
    attention_varlen(q, packed, packed, ends, ints(0, 5, 14), 2, PAGE).float().sum().backward()
    assert q.grad is not None


def test_a_refused_gradient_names_what_the_caller_gave() -> None:
    q, k, ends = random(3, HEADS, D).requires_grad_(), random(3, HEADS_KV, D), ints(0, 2, 3)
    counts = {"seqused_q": ints(1, 1), "seqused_k": ints(2, 1)}
    with pytest.raises(NotImplementedError, match=r"packed queries with seqused_q and seqused_k have none: "):
        flash_attn_3.flash_attn_varlen_func(q, k, k, ends, ends, 2, 2, **counts)
    with pytest.raises(NotImplementedError, match=r"packed queries with n_splits have none: "):
        attention_varlen(q, k, k, ends, ends, 2, 2, n_splits=3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"cache_seqlens": [3, PAGE]},
            "cache_seqlens has a count below 0, or one behind which the cache has no",
        ),
        ({"cache_seqlens": [3, -1]}, "cache_seqlens has a count below 0"),
        ({"cache_seqlens": [3, 2**31 - 1]}, "cache_seqlens has a count below 0, or one behind which"),
        (
            {"page_table": [[0, 1], [2, -1]], "cache_seqlens": [3, PAGE]},
            "the table of pages names a page that",
        ),
        ({"page_table": [[0], [2]], "cache_seqlens": [3, PAGE]}, "or one behind which the cache has no room"),
        ({"cache_batch_idx": [0, -1]}, "cache_batch_idx names an item that k_cache does not have"),
        ({"cache_leftpad": [0, 5]}, "cache_leftpad has a number below 0, or above that of cache_seqlens"),
        ({"cache_leftpad": [0, -1]}, "cache_leftpad has a number below 0"),
        ({"cu_seqlens_k_new": [1, 1, 2]}, "cu_seqlens_k_new does not start with 0"),
        ({"cu_seqlens_k_new": [0, 2, 1]}, "cu_seqlens_k_new does not start with 0, decreases"),
        ({"cu_seqlens_k_new": [0, 1, 3]}, "cu_seqlens_k_new .* ends beyond the rows of k"),
    ],
    ids=str,
)
@pytest.mark.only_on("cpu")
def test_compiled_calls_append_nothing_to_what_is_not_there(change: dict[str, Any], said: str) -> None:
    """They read no numbers, and assert."""
    caches = random(3, PAGE, HEADS_KV, D), random(3, PAGE, HEADS_KV, D)
    before = [x.clone() for x in caches]
    new = random(2, HEADS_KV, D) if "cu_seqlens_k_new" in change else random(2, 1, HEADS_KV, D)
    given = {name: torch.tensor(x, dtype=INT) for name, x in ({"cache_seqlens": [3, 4]} | change).items()}
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_3.flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=said):
        compiled(random(2, 1, HEADS, D), *caches, new, new, **given)
    assert all(map(torch.equal, caches, before))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("library", [flash_attn_2, flash_attn_3], ids=["2", "3"])
def test_rotation_under_autocast_to_the_other_type_of_16_bits(library: Any, interleaved: bool) -> None:
    """Inputs of one type of 16 bits stay as they are, and PyTorch joins no others than autocast's."""
    q, new, angles = random(2, 1, HEADS, D), random(2, 1, HEADS_KV, D), torch.rand(PAGE, 8)
    caches = random(2, PAGE, HEADS_KV, D), random(2, PAGE, HEADS_KV, D)

    def call() -> list[Tensor]:
        own = [x.clone() for x in caches]
        out = library.flash_attn_with_kvcache(
            q, *own, new, new, cache_seqlens=ints(3, 4), causal=True, rotary_interleaved=interleaved,
            rotary_cos=angles.cos().to(BF), rotary_sin=angles.sin().to(BF),
        )  # fmt: skip
        return [out, *own]

    expected = call()
    with torch.autocast(q.device.type, dtype=torch.float16):
        assert all(map(torch.equal, call(), expected))


def spread(x: Tensor) -> Tensor:
    """The same numbers with a stride of 2."""
    return torch.stack((x, x - 99), 1)[:, 0]


def test_flash_attn_3_takes_offsets_and_counts_of_any_stride() -> None:
    q, k, ends = random(5, HEADS, D), random(9, HEADS_KV, D), {"cu_seqlens_q": ints(0, 2, 5)}
    packed = ends | {"cu_seqlens_k": ints(0, 4, 9), "seqused_q": ints(1, 3), "seqused_k": ints(4, 2)}
    cached = ends | {
        "cache_seqlens": ints(3, 7), "cache_leftpad": ints(1, 4), "cu_seqlens_k_new": ints(0, 2, 3),
        "cache_batch_idx": ints(2, 0), "rotary_seqlens": ints(0, 4), "page_table": ints(1, 0, 2)[:, None],
    }  # fmt: skip
    caches, new = (random(3, PAGE, HEADS_KV, D), random(3, PAGE, HEADS_KV, D)), random(3, HEADS_KV, D)
    turns = {"rotary_cos": torch.rand(PAGE, 8).to(BF), "rotary_sin": torch.rand(PAGE, 8).to(BF)}

    def results(change: Any) -> list[Tensor]:
        own = [x.clone() for x in caches]
        rows = {name: change(x) for name, x in packed.items()}
        out = flash_attn_3.flash_attn_varlen_func(q, k, k, max_seqlen_q=3, max_seqlen_k=5, **rows)
        rows = {name: change(x) for name, x in cached.items()}
        over = flash_attn_3.flash_attn_with_kvcache(q, *own, new, new, max_seqlen_q=3, **rows, **turns)
        return [out, over, *own]

    assert all(map(torch.equal, results(spread), results(torch.clone)))


@pytest.mark.parametrize("name", ["validate", "numerics"])
def test_an_array_is_no_flag_and_no_word(name: str) -> None:
    q, ends = random(3, HEADS, D), ints(0, 2, 3)
    with pytest.raises(TypeError, match=rf"^{name} is "):
        attention_varlen(q, q, q, ends, ends, 2, 2, **{name: np.ones(3)})
    with pytest.raises(TypeError, match=rf"^{name} is "):
        attention_cached(q[:, None], q[:, None], q[:, None], ints(1, 1, 0), **{name: np.ones(3)})


@pytest.mark.parametrize("items", [None, (0, 1)], ids=["in order", "by items"])
def test_a_cache_in_one_piece_stays_so(
    items: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of the Hopper family take it with any capacity, and pages with a multiple of 16 rows alone."""
    tables = []

    def attend(*args: Any, **options: Any) -> Any:
        tables.append(options["block_table"])
        return attention_varlen(*args, **options)

    monkeypatch.setattr(packed_cache, "attention_varlen", attend)
    cache, queries = random(3, 37, HEADS_KV, D), random(2, 1, HEADS, D)
    out = flash_attn_3.flash_attn_with_kvcache(
        queries,
        cache,
        cache,
        cache_seqlens=ints(37, 20),
        cache_batch_idx=None if items is None else ints(*items),
    )
    assert [table is None for table in tables] == [items is None]
    expected, _ = reference(queries[1:], cache[1:2, :20], cache[1:2, :20])
    torch.testing.assert_close(out[1:].double(), expected, atol=2e-2, rtol=2e-2)


@in_words(score_mod="attention_chunk", mask_mod="attention_chunk")
def refusing(text: str) -> None:
    raise NotImplementedError(text)


@pytest.mark.parametrize("words", ["no score_mod and no mask_mod", "no score_mod or mask_mod"])
def test_one_argument_is_named_once(words: str) -> None:
    with pytest.raises(NotImplementedError, match=r"^kernels take no attention_chunk for packed queries$"):
        refusing(f"kernels take {words} for packed queries")
