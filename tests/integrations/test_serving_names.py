"""The names of flash-attn 3, vLLM and FlashInfer: their meaning by the float64 reference, and refusals."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from serving_calls import CALLS, ServingCall
from torch import Tensor

from flash_attention.errors import NoKernelError
from flash_attention.integrations import flash_attn_3, flashinfer, vllm
from flash_attention.merge import merge
from flash_helpers.test.reference import reference

BF, INT = torch.bfloat16, torch.int32
HEADS, HEADS_KV, D, CAPACITY = 4, 2, 32, 48
QUERIES, LENGTHS, NEW, PAD = (5, 1, 0, 3), (20, 44, 7, 0), (2, 1, 0, 3), (3, 0, 7, 0)


def random(*shape: int) -> Tensor:
    """The same on every device."""
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device="cpu").to(BF).to(torch.get_default_device())


def shuffled(n: int, seed: int) -> Tensor:
    order = torch.randperm(n, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return order.to(INT).to(torch.get_default_device())


def ints(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=INT)


def ends(lengths: tuple[int, ...]) -> Tensor:
    return ints([0, *accumulate(lengths)])


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, atol=2e-2, rtol=2e-2)


class Cache:
    """A cache of more items than there are sequences, in one piece or in pages of 7, and what it holds."""

    def __init__(self, paged: bool) -> None:
        self.items = ints([5, 2, 0, 3])
        self.dense = [random(6, CAPACITY, HEADS_KV, D), random(6, CAPACITY, HEADS_KV, D).neg()]
        self.table = None
        self.caches = [x.clone() for x in self.dense]
        if paged:
            n = -(-CAPACITY // 7)
            self.table = shuffled(6 * n, 1).view(6, n)
            self.caches = []
            for x in self.dense:
                pages = random(6 * n, 7, HEADS_KV, D)
                pages[self.table.flatten().long()] = torch.nn.functional.pad(
                    x, (0, 0, 0, 0, 0, n * 7 - CAPACITY)
                ).reshape(-1, 7, HEADS_KV, D)
                self.caches.append(pages)

    def rows(self, which: int, sequence: int, first: int, last: int) -> Tensor:
        """What the cache holds now, (1, n, heads, d)."""
        item = int(self.items[sequence])
        x = self.caches[which]
        if self.table is None:
            return x[item : item + 1, first:last]
        return x[self.table[item].long()].flatten(0, 1)[None, first:last]


# ---------------------------------------------------------------------- flash-attn 3
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("leftpad", [False, True], ids=["", "leftpad"])
@pytest.mark.parametrize("appended", [False, True], ids=["", "appended"])
@pytest.mark.parametrize("paged", [False, True], ids=["", "paged"])
def test_packed_queries_and_appends(paged: bool, appended: bool, leftpad: bool, num_splits: int) -> None:
    cache, pad = Cache(paged), PAD if leftpad else (0,) * 4
    q = random(sum(QUERIES) + 2, HEADS, D)
    k, v = random(sum(NEW) + 1, HEADS_KV, D), random(sum(NEW) + 1, HEADS_KV, D).neg()
    before = [x.clone() for x in cache.caches]
    options: dict[str, Any] = {"k": k, "v": v, "cu_seqlens_k_new": ends(NEW)} if appended else {}
    out, lse = flash_attn_3.flash_attn_with_kvcache(
        q, *cache.caches, cache_seqlens=ints(LENGTHS), cache_batch_idx=cache.items, page_table=cache.table,
        cache_leftpad=ints(pad) if leftpad else None, cu_seqlens_q=ends(QUERIES), max_seqlen_q=max(QUERIES),
        causal=True, num_splits=num_splits, return_softmax_lse=True, **options,
    )  # fmt: skip
    assert (out[-2:] == 0).all()
    assert (lse[:, -2:] == -math.inf).all()
    changed = sum(int((x != y).any(-1).any(-1).sum()) for x, y in zip(cache.caches, before, strict=True))
    assert changed == (2 * sum(NEW) if appended else 0)
    for i, (begin, n) in enumerate(zip(accumulate((0, *QUERIES)), QUERIES, strict=False)):
        last = LENGTHS[i] + (NEW[i] if appended else 0)
        if appended:
            first = sum(NEW[:i])
            for which, new in enumerate((k, v)):
                assert (cache.rows(which, i, LENGTHS[i], last)[0] == new[first : first + NEW[i]]).all()
        if n:
            keys = (cache.rows(which, i, pad[i], last) for which in range(2))
            expected = reference(q[None, begin : begin + n], *keys, causal=True)
            close(out[begin : begin + n], expected[0][0])
            close(lse[:, begin : begin + n], expected[1][0])


@pytest.mark.parametrize("window", [(-1, -1), (6, 2)], ids=["", "window"])
def test_a_batch_gives_what_its_packed_form_gives(window: tuple[int, int]) -> None:
    cache, q = Cache(True), random(4, 3, HEADS, D)
    given = dict(
        cache_seqlens=ints(LENGTHS), cache_batch_idx=cache.items, page_table=cache.table, window_size=window,
        return_softmax_lse=True,
    )  # fmt: skip
    out, lse = flash_attn_3.flash_attn_with_kvcache(q, *cache.caches, **given)
    offsets = torch.arange(5, dtype=INT) * 3
    packed, packed_lse = flash_attn_3.flash_attn_with_kvcache(
        q.flatten(0, 1), *cache.caches, cu_seqlens_q=offsets, max_seqlen_q=3, **given
    )
    assert torch.equal(out.flatten(0, 1), packed)
    assert torch.equal(lse.transpose(0, 1).flatten(1), packed_lse)
    assert lse.shape == (4, HEADS, 3)


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_rotary_positions_of_packed_rows(causal: bool) -> None:
    """As one call a sequence, without packing, gives them."""
    lengths, starts = (20, 40, 7, 0), ints([4, 0, 9, 2])
    cos, sin = (torch.rand(CAPACITY + 8, D // 2).to(BF) for _ in range(2))
    cache, alone = Cache(False), Cache(False)
    q, k, v = random(sum(QUERIES), HEADS, D), random(sum(NEW), HEADS_KV, D), random(sum(NEW), HEADS_KV, D)
    turn = {"rotary_cos": cos, "rotary_sin": sin, "causal": causal}
    out = flash_attn_3.flash_attn_with_kvcache(
        q, *cache.caches, k, v, cache_seqlens=ints(lengths), cache_batch_idx=cache.items,
        cu_seqlens_q=ends(QUERIES), cu_seqlens_k_new=ends(NEW), max_seqlen_q=5, rotary_seqlens=starts, **turn,
    )  # fmt: skip
    for i, (begin, n) in enumerate(zip(accumulate((0, *QUERIES)), QUERIES, strict=False)):
        new = slice(sum(NEW[:i]), sum(NEW[: i + 1]))
        one = flash_attn_3.flash_attn_with_kvcache(
            q[None, begin : begin + n], *alone.caches, k[None, new], v[None, new],
            cache_seqlens=ints([lengths[i]]), cache_batch_idx=cache.items[i : i + 1],
            rotary_seqlens=starts[i : i + 1], **turn,
        )  # fmt: skip
        torch.testing.assert_close(out[begin : begin + n], one[0])
    assert all(map(torch.equal, cache.caches, alone.caches))


def test_chunks_of_attention() -> None:
    q, k, v = random(1, 20, HEADS, D), random(1, 33, HEADS_KV, D), random(1, 33, HEADS_KV, D)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i + 13) // 10 == j // 10

    expected, _ = reference(q, k, v, causal=True, mask_mod=mask)
    close(flash_attn_3.flash_attn_func(q, k, v, causal=True, attention_chunk=10), expected)
    offsets = ints([0, 20]), ints([0, 33])
    rows = q[0], k[0], v[0]
    packed = flash_attn_3.flash_attn_varlen_func(*rows, *offsets, 20, 33, causal=True, attention_chunk=10)
    close(packed, expected[0])
    cached = flash_attn_3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=ints([33]), causal=True, attention_chunk=10
    )
    close(cached, expected)


def test_rows_that_count_of_packed_sequences() -> None:
    q, k, v = random(9, HEADS, D), random(30, HEADS_KV, D), random(30, HEADS_KV, D)
    out, lse = flash_attn_3.flash_attn_varlen_func(
        q, k, v, ints([0, 5, 9]), ints([0, 14, 30]), 5, 16, seqused_q=ints([2, 4]), seqused_k=ints([9, 16]),
        causal=True, return_attn_probs=True,
    )  # fmt: skip
    expected, _ = reference(q[None, :2], k[None, :9], v[None, :9], causal=True)
    close(out[:2], expected[0])
    assert (out[2:5] == 0).all()
    assert (lse[:, 2:5] == -math.inf).all()
    close(out[5:], reference(q[None, 5:], k[None, 14:], v[None, 14:], causal=True)[0][0])


@pytest.mark.parametrize("stacked", [False, True])
def test_queries_keys_and_values_in_one_tensor(stacked: bool) -> None:
    heads_kv = HEADS if stacked else HEADS_KV
    q, k, v = (random(2, 9, n, D).requires_grad_() for n in (HEADS, heads_kv, heads_kv))
    qkv = (torch.stack((q, k, v), 2) if stacked else torch.cat((q, k, v), 2)).detach().requires_grad_()
    options: dict[str, Any] = {
        "causal": True,
        "attention_chunk": 4,
        "softcap": 3.0,
        "return_attn_probs": True,
    }
    expected = flash_attn_3.flash_attn_func(q, k, v, **options)
    given = None if stacked else HEADS
    found = flash_attn_3.flash_attn_qkvpacked_func(qkv, num_heads_q=given, **options)
    assert all(map(torch.equal, found, expected))
    (gradient,) = torch.autograd.grad(found[0].sum(), qkv)
    gradients = torch.autograd.grad(expected[0].sum(), (q, k, v))
    assert torch.equal(gradient, torch.stack(gradients, 2) if stacked else torch.cat(gradients, 2))


@pytest.mark.parametrize(
    ("shape", "num_heads_q", "error", "words"),
    [
        (
            (2, 9, 8, D),
            None,
            TypeError,
            r"^num_heads_q is None; beside qkv \(2, 9, 8, 32\) it must be an int",
        ),
        ((2, 9, 8, D), 8, ValueError, "^num_heads_q is 8, .* it must leave an even number of them"),
        ((2, 9, 8, D), 3, ValueError, "^num_heads_q is 3, .* it must leave an even number of them"),
        ((2, 9, 8, D), 0, ValueError, "^num_heads_q is 0, .* it must leave an even number of them"),
        ((2, 9, 3, 4, D), 2, ValueError, r"^num_heads_q is 2, .* has 4 heads of queries: pass None"),
        (
            (9, 3, D),
            None,
            ValueError,
            r"^qkv has shape \(9, 3, 32\); it must be \(batch, seq_len, 3, n_heads",
        ),
    ],
)
def test_heads_of_one_tensor_that_do_not_fit(
    shape: tuple[int, ...], num_heads_q: int | None, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        flash_attn_3.flash_attn_qkvpacked_func(random(*shape), num_heads_q=num_heads_q)


def test_combine() -> None:
    q = random(2, 5, HEADS, D)
    keys = [(random(2, n, HEADS_KV, D), random(2, n, HEADS_KV, D)) for n in (7, 9)]
    parts = [flash_attn_3.flash_attn_func(q, *kv, return_attn_probs=True) for kv in keys]
    outputs = torch.stack([out.float() for out, _ in parts])
    lses = torch.stack([lse.transpose(-1, -2) for _, lse in parts])
    out, lse = flash_attn_3.flash_attn_combine(outputs, lses, out_dtype=BF)
    k, v = (torch.cat(x, 1) for x in zip(*keys, strict=True))
    expected = reference(q, k, v)
    close(out, expected[0])
    close(lse.transpose(-1, -2), expected[1])


def test_combine_writes_into_out() -> None:
    outputs, lses = torch.randn(3, 2, 5, HEADS, D), torch.randn(3, 2, 5, HEADS)
    expected = flash_attn_3.flash_attn_combine(outputs, lses)
    for dtype in (None, BF):
        out = torch.full((2, 5, HEADS, D), math.nan, dtype=dtype or torch.float32)
        merged, lse = flash_attn_3.flash_attn_combine(outputs, lses, out=out, out_dtype=dtype)
        assert merged is out
        assert torch.equal(out, expected[0].to(out.dtype))
        assert torch.equal(lse, expected[1])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"lse_partial": torch.zeros(3, 2, 5, HEADS, dtype=BF, device="cpu")},
            TypeError,
            r"^lse_partial is torch.bfloat16; it must be torch.float32 or torch.float64: use lse_partial",
        ),
        (
            {
                "out_partial": torch.zeros(0, 2, 5, HEADS, D, device="cpu"),
                "lse_partial": torch.zeros(0, 2, 5, HEADS, device="cpu"),
            },
            ValueError,
            r"^out_partial has shape \(0, 2, 5, 4, 32\); it must have one part at least",
        ),
        ({"out": torch.zeros(2, 5, HEADS, 8, device="cpu")}, ValueError, "^out has shape"),
        ({"out": torch.zeros(2, 5, HEADS, D, dtype=BF, device="cpu")}, TypeError, "^out is torch.bfloat16"),
        (
            {"out": torch.zeros(2, 5, HEADS, D, device="cpu"), "out_dtype": "float32"},
            TypeError,
            "^out_dtype is 'float32'; it must be a floating type or None",
        ),
    ],
)
@pytest.mark.only_on("cpu")
def test_what_combine_refuses_is_said_in_its_words(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    given: dict[str, Any] = {"out_partial": torch.zeros(3, 2, 5, HEADS, D)}
    given |= {"lse_partial": torch.zeros(3, 2, 5, HEADS)} | change
    with pytest.raises(error, match=words):
        flash_attn_3.flash_attn_combine(**given)


def test_combine_refuses_an_out_that_is_read_or_differentiated() -> None:
    parts, lses = torch.zeros(3, 2, 5, HEADS, D), torch.zeros(3, 2, 5, HEADS)
    with pytest.raises(ValueError, match=r"^out overlaps out_partial in memory"):
        flash_attn_3.flash_attn_combine(parts, lses, out=parts[0])
    out = torch.zeros(2, 5, HEADS, D)
    with pytest.raises(
        NotImplementedError, match="requires grad, and what is written in place has no gradient"
    ):
        flash_attn_3.flash_attn_combine(parts.requires_grad_(), lses, out=out)


REFUSED = {
    "qv": torch.ones(1), "q_descale": torch.ones(1), "k_descale": torch.ones(1), "v_descale": torch.ones(1),
    "sm_margin": 4, "scheduler_metadata": torch.ones(1),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_flash_attn_3_refuses_is_named(name: str) -> None:
    cache = Cache(False)
    with pytest.raises(NotImplementedError, match=rf"^{name} is "):
        flash_attn_3.flash_attn_with_kvcache(random(4, 1, HEADS, D), *cache.caches, **{name: REFUSED[name]})
    if name != "scheduler_metadata":
        with pytest.raises(NotImplementedError, match=rf"^{name} is "):
            flash_attn_3.flash_attn_func(*[random(1, 2, 2, D)] * 3, **{name: REFUSED[name]})


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"cu_seqlens_q": ints([0, 1, 2, 3, 4])},
            r"q has shape \(4, 1, 4, 32\); with cu_seqlens_q it must be \(total_q",
        ),
        ({"cache_leftpad": ints([1])}, "cache_leftpad has shape"),
        ({"cache_leftpad": ints([1, -1, 0, 0])}, "cache_leftpad has -1"),
        (
            {"cache_leftpad": ints([1, 45, 0, 0])},
            "cache_leftpad has 45 for item 1, and cache_seqlens 44, which counts",
        ),
        ({"num_splits": 300}, "num_splits is 300"),
        ({"attention_chunk": -1}, "attention_chunk is -1"),
        ({"cache_seqlens": ints([1, 1, 1])}, "cache_seqlens has shape"),
        ({"k": random(4, 1, 2, D)}, "k and v must be given together"),
        ({"k": random(3, 1, 2, D), "v": random(3, 1, 2, D)}, "k has shape"),
        ({"k": random(4, 60, 2, D), "v": random(4, 60, 2, D)}, "the cache holds 48 an item"),
        (
            {"k": random(4, 1, 2, D), "v": random(4, 1, 2, D), "cache_seqlens": 2**31 - 1},
            "make 2147483648 keys of an item",
        ),
        ({"cache_batch_idx": ints([0, 1, 2, 9])}, "cache_batch_idx has 9"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(change: dict[str, Any], words: str) -> None:
    cache = Cache(False)
    before = [x.clone() for x in cache.caches]
    arguments = {"cache_seqlens": ints(LENGTHS), **change}
    with pytest.raises((ValueError, TypeError), match=words):
        flash_attn_3.flash_attn_with_kvcache(random(4, 1, HEADS, D), *cache.caches, **arguments)
    assert all(map(torch.equal, cache.caches, before))


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("leftpad", [None, (0, 4, 0, 0)], ids=["", "leftpad"])
@pytest.mark.parametrize("appended", [False, True], ids=["", "appended"])
def test_what_is_wrong_with_pages_is_said_of_the_callers_table(
    appended: bool, leftpad: tuple[int, ...] | None
) -> None:
    """Item 1 of the call reads row 2 of the table, which names no page in the place of its second."""
    cache = Cache(True)
    assert cache.table is not None
    cache.table[2, 1] = -7
    before = [x.clone() for x in cache.caches]
    new = random(4, 1, HEADS_KV, D)
    with pytest.raises(
        ValueError,
        match=r"^page_table\[2, 1\] is -7, and .* have the pages 0 to 41: name one of these, or ",
    ):
        flash_attn_3.flash_attn_with_kvcache(
            random(4, 1, HEADS, D), *cache.caches, *([new, new] if appended else []),
            cache_seqlens=ints((20, 44, 7, 0)), cache_batch_idx=cache.items, page_table=cache.table,
            cache_leftpad=None if leftpad is None else ints(leftpad),
        )  # fmt: skip
    assert all(map(torch.equal, cache.caches, before))
    if leftpad is not None:  # a page of padding alone is not read
        flash_attn_3.flash_attn_with_kvcache(
            random(4, 1, HEADS, D), *cache.caches, cache_seqlens=ints((20, 44, 7, 0)),
            cache_batch_idx=cache.items, page_table=cache.table, cache_leftpad=ints((0, 14, 0, 0)),
        )  # fmt: skip


@pytest.mark.only_on("cpu")
def test_rows_of_a_table_that_are_not_there() -> None:
    cache = Cache(True)
    with pytest.raises(ValueError, match=r"^cache_batch_idx has 6; page_table has the rows 0 to 5$"):
        flash_attn_3.flash_attn_with_kvcache(
            random(4, 1, HEADS, D), *cache.caches, cache_seqlens=ints(LENGTHS),
            cache_batch_idx=ints([6, 2, 0, 3]), page_table=cache.table,
        )  # fmt: skip


def test_there_is_no_plan_to_be_made_ahead() -> None:
    assert flash_attn_3.get_scheduler_metadata(4, 1, CAPACITY, HEADS, HEADS_KV, D, ints(LENGTHS), BF) is None


# ---------------------------------------------------------------------- vLLM
@pytest.mark.parametrize("d", [D, 40, 59])
@pytest.mark.parametrize("given", [False, True], ids=["", "out"])
def test_vllm_over_pages(given: bool, d: int) -> None:
    n_pages, page_size = 20, 16
    pages = random(n_pages, page_size, HEADS_KV, d), random(n_pages, page_size, HEADS_KV, d).neg()
    table = shuffled(n_pages, 2)[:12].view(4, 3)
    q, sinks = random(sum(QUERIES), HEADS, d), random(HEADS)
    out = torch.full_like(q, math.nan) if given else None
    result, lse = vllm.flash_attn_varlen_func(
        q=q, k=pages[0], v=pages[1], max_seqlen_q=5, cu_seqlens_q=ends(QUERIES), max_seqlen_k=48,
        seqused_k=ints(LENGTHS), block_table=table, causal=True, window_size=[12, 0], out=out, s_aux=sinks,
        softcap=20.0, return_softmax_lse=True, fa_version=3, num_splits=2,
    )  # fmt: skip
    assert out is None or result is out
    for i, (begin, n) in enumerate(zip(accumulate((0, *QUERIES)), QUERIES, strict=False)):
        if n:
            keys = (x[table[i].long()].flatten(0, 1)[None, : LENGTHS[i]] for x in pages)
            rows = slice(begin, begin + n)
            expected = reference(q[None, rows], *keys, causal=True, window=(12, 0), softcap=20.0, sinks=sinks)
            close(result[rows], expected[0][0])
            close(lse[:, rows], expected[1][0])


def test_vllm_over_packed_keys() -> None:
    q, k, v = random(9, HEADS, D), random(30, HEADS_KV, D), random(30, HEADS_KV, D)
    out = vllm.flash_attn_varlen_func(q, k, v, 5, ints([0, 5, 9]), 16, ints([0, 14, 30]), causal=True)
    close(out[:5], reference(q[None, :5], k[None, :14], v[None, :14], causal=True)[0][0])


@pytest.mark.parametrize(
    ("name", "value"),
    [("q_v", torch.ones(1)), ("dropout_p", 0.1), ("cp_rank", 1),
     ("scheduler_metadata", torch.ones(1)), ("output_scale", torch.ones(1)), ("cp_world_size", 2)],
)  # fmt: skip
def test_what_vllm_is_refused_is_named(name: str, value: object) -> None:
    q, k = random(9, HEADS, D), random(30, HEADS_KV, D)
    with pytest.raises(NotImplementedError, match=rf"^{name} is "):
        vllm.flash_attn_varlen_func(q, k, k, 5, ints([0, 5, 9]), 16, ints([0, 14, 30]), **{name: value})


# ---------------------------------------------------------------------- both
@pytest.mark.only_on("cpu")  # tests/gpu/test_serving_graphs.py has the others
@pytest.mark.parametrize("title", CALLS)
def test_lengths_tables_and_pages_that_change_in_place(title: str) -> None:
    call = ServingCall("cpu", **CALLS[title])
    for seed in range(3):
        call.draw(seed)
        call.check(*call.call())


# ---------------------------------------------------------------------- FlashInfer
def test_merge_states() -> None:
    outputs = random(6, 3, HEADS, D).half()
    lses = torch.randn(6, 3, HEADS)
    lses[2] = -math.inf
    lses[3, 1] = -math.inf
    out, lse = flashinfer.merge_states(outputs, lses)
    natural = [x.T * math.log(2) for x in lses.unbind(1)]
    expected, expected_lse = merge(list(outputs.unbind(1)), natural)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse.T / math.log(2))
    weights = torch.softmax(lses[0] * math.log(2), 0)
    torch.testing.assert_close(out[0].float(), (weights[..., None] * outputs[0]).sum(0), atol=2e-3, rtol=2e-3)
    assert (lse[2] == -math.inf).all()
    pair = flashinfer.merge_state(outputs[:, 0], lses[:, 0], outputs[:, 1], lses[:, 1])
    both = flashinfer.merge_states(outputs[:, :2], lses[:, :2])
    assert all(map(torch.equal, pair, both))
    v, s = outputs[:, 0].clone(), lses[:, 0].clone()
    mask = torch.tensor([True, False] * 3)
    flashinfer.merge_state_in_place(v, s, outputs[:, 1], lses[:, 1], mask)
    assert torch.equal(v[mask], pair[0][mask])
    assert torch.equal(s[mask], pair[1][mask])
    assert torch.equal(v[~mask], outputs[:, 0][~mask])


def test_merging_in_place_says_what_to_do() -> None:
    v, s = torch.randn(6, HEADS, D), torch.randn(6, HEADS)
    with pytest.raises(ValueError, match=r"v overlaps v_other .*: pass v.clone\(\), and keep it, or call me"):
        flashinfer.merge_state_in_place(v, s, v, s.clone())
    wide = v[:1].expand(6, HEADS, D)
    with pytest.raises(
        ValueError, match=r"elements of v share memory .*: pass v.contiguous\(\), and keep it"
    ):
        flashinfer.merge_state_in_place(wide, s, v, s.clone())


def in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor) -> tuple[Tensor, Tensor]:
    flashinfer.merge_state_in_place(v, s, v_other, s_other)
    return v, s


def combined_into(parts: Tensor, lses: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    return flash_attn_3.flash_attn_combine(parts, lses, out=out)


WRITERS: dict[str, Any] = {
    "merge_state_in_place": (in_place, ((6, HEADS, D), (6, HEADS), (6, HEADS, D), (6, HEADS))),
    "flash_attn_combine": (combined_into, ((3, 2, 5, HEADS, D), (3, 2, 5, HEADS), (2, 5, HEADS, D))),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_in_place_in_a_compiled_program(name: str) -> None:
    call, shapes = WRITERS[name]
    given = [torch.randn(shape) for shape in shapes]
    expected = call(*(x.clone() for x in given))
    found = torch.compile(call, backend="eager", fullgraph=True)(*given)
    assert all(map(torch.equal, found, expected))
    on_meta = call(*(x.to("meta") for x in given))
    assert [x.shape for x in on_meta] == [x.shape for x in expected]


@pytest.mark.gpu
@pytest.mark.parametrize("appended", [0, 2])
def test_chunks_on_a_gpu_are_refused_by_name(appended: int) -> None:
    q = random(1, 20, HEADS, D).cuda()
    caches = random(1, 33, HEADS_KV, D).cuda(), random(1, 33, HEADS_KV, D).cuda()
    new = [random(1, appended, HEADS_KV, D).cuda()] * 2 if appended else []
    before = [x.clone() for x in caches]
    with pytest.raises(NoKernelError, match="attention_chunk"):
        flash_attn_3.flash_attn_with_kvcache(
            q, *caches, *new, cache_seqlens=31, causal=True, attention_chunk=10
        )
    assert all(map(torch.equal, caches, before))


def test_tables_of_a_rotation_without_new_keys_are_refused() -> None:
    q, cache, table = random(2, 1, HEADS, D), random(2, 9, HEADS_KV, D), random(9, D // 2)
    with pytest.raises(ValueError, match="rotary_cos and rotary_sin are given without k and v: rotate q"):
        flash_attn_3.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=4, rotary_cos=table, rotary_sin=table
        )


def test_counts_beyond_the_cache_are_cut_down() -> None:
    q, cache = random(2, 1, HEADS, D), random(2, 9, HEADS_KV, D)
    found = flash_attn_3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=40)
    assert torch.equal(found, flash_attn_3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=9))


def test_vllms_function_refuses_gradients() -> None:
    q, k = random(4, HEADS, D).requires_grad_(), random(4, HEADS_KV, D)
    cu = ints([0, 4])
    with pytest.raises(
        NotImplementedError, match="requires grad, and this function, as vLLM's, has no gradient"
    ):
        vllm.flash_attn_varlen_func(q, k, k, 4, cu, 4, cu_seqlens_k=cu)
