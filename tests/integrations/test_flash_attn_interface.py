"""flash-attn's functions: meaning, and what is refused. Expected values come from the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flash_attention.compat import flash_attn
from flash_attention.compat.kv_cache import rotated
from flash_helpers.test.reference import reference

TOLERANCE = {"atol": 2e-3, "rtol": 2e-3}
HEADS, HEADS_KV, D_HEAD = 4, 2, 32


def random(*shape: int) -> Tensor:
    """The same on every device."""
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cpu").half().to(torch.get_default_device())


def qkv(seq_len_q: int, seq_len_k: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(batch, seq_len_q, HEADS, D_HEAD),
        random(batch, seq_len_k, HEADS_KV, D_HEAD),
        random(batch, seq_len_k, HEADS_KV, D_HEAD) + 1,
    )


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, **TOLERANCE)


# ---------------------------------------------------------------------- batches and packed sequences
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (5, 0), (-1, 3)])
def test_func(causal: bool, window: tuple[int, int]) -> None:
    q, k, v = qkv(9, 20)
    out, lse, probs = flash_attn.flash_attn_func(
        q, k, v, 0.0, 0.25, causal, window, 4.0, None, True, return_attn_probs=True
    )
    limits = tuple(None if side < 0 else side for side in window)
    expected = reference(q, k, v, causal=causal, window=limits, softcap=4.0, softmax_scale=0.25)
    close(out, expected[0])
    close(lse, expected[1])
    assert probs.numel() == 0
    assert (flash_attn.flash_attn_func(q, k, v, 0.0, 0.25, causal, window, 4.0) == out).all()


def test_packed_inputs() -> None:
    q, k, v = qkv(12, 12)
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    kv = torch.stack((k, v), dim=2)
    assert (flash_attn.flash_attn_kvpacked_func(q, kv, causal=True) == expected).all()
    qkv_packed = torch.stack((q[:, :, :HEADS_KV], k, v), dim=2)
    expected = flash_attn.flash_attn_func(q[:, :, :HEADS_KV], k, v, causal=True)
    assert (flash_attn.flash_attn_qkvpacked_func(qkv_packed, causal=True) == expected).all()
    with pytest.raises(
        ValueError, match=r"qkv has shape .* it must be \(batch, seq_len, 3, n_heads, d_head\)"
    ):
        flash_attn.flash_attn_qkvpacked_func(kv)


def test_varlen_functions() -> None:
    q, k, v = (x.flatten(0, 1) for x in qkv(12, 12, batch=1))
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, offsets, offsets, 7, 7, causal=True, return_attn_probs=True
    )
    for rows in (slice(0, 5), slice(5, 12)):
        expected = reference(q[None, rows], k[None, rows], v[None, rows], causal=True)
        close(out[None, rows], expected[0])
        close(lse[None, :, rows], expected[1])
    kv = torch.stack((k, v), dim=1)
    packed = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 7, 7, causal=True)
    assert (packed == out).all()
    few = q[:, :HEADS_KV]
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack((few, k, v), dim=1), offsets, 7)
    assert (packed == flash_attn.flash_attn_varlen_func(few, k, v, offsets, offsets, 7, 7)).all()


# ---------------------------------------------------------------------- refusals
def test_dropped_weights_are_not_told() -> None:
    with pytest.raises(NotImplementedError, match=r"^dropout_p is 0\.5, and return_attn_probs is True"):
        flash_attn.flash_attn_func(*qkv(4, 4), dropout_p=0.5, return_attn_probs=True)


# ---------------------------------------------------------------------- the cache
CAPACITY, LENGTHS, NEW = 64, (17, 0), 3


def cache_call(**options):
    """Lengths 17 and 0, three new keys each; what lies behind them in the cache is NaN."""
    q, k_cache, v_cache = qkv(NEW, CAPACITY)
    for i, length in enumerate(LENGTHS):
        k_cache[i, length:] = torch.nan
        v_cache[i, length:] = torch.nan
    _, k, v = qkv(NEW, NEW)
    return q, k_cache, v_cache, k, v


def unchanged(cache: Tensor | tuple[Tensor, ...], before: Tensor | tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(cache, before, atol=0, rtol=0, equal_nan=True)


def grown(cache: Tensor, new: Tensor) -> list[Tensor]:
    return [torch.cat((cache[i, :n], new[i]))[None] for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("window", [(-1, -1), (4, 0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_cache_is_appended_to_and_attended(causal: bool, window: tuple[int, int], compiled: bool) -> None:
    q, k_cache, v_cache, k, v = cache_call()
    keys, values = grown(k_cache, k), grown(v_cache, v)
    call = flash_attn.flash_attn_with_kvcache
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    out, lse = call(
        q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor(LENGTHS).int(), causal=causal,
        window_size=window, return_softmax_lse=True,
    )  # fmt: skip
    limits = tuple(None if side < 0 else side for side in window)
    for i, n in enumerate(LENGTHS):
        expected = reference(q[i : i + 1], keys[i], values[i], causal=causal, window=limits)
        close(out[i : i + 1], expected[0])
        close(lse[i : i + 1], expected[1])
        assert (k_cache[i, : n + NEW] == keys[i][0]).all()
        assert (v_cache[i, : n + NEW] == values[i][0]).all()
        assert k_cache[i, n + NEW :].isnan().all()
        assert v_cache[i, n + NEW :].isnan().all()


def same(got: Tensor, expected: Tensor) -> None:
    """Equal bits on the CPU; on a GPU, where layouts may choose kernels, equal but for rounding."""
    if got.is_cuda:
        torch.testing.assert_close(got, expected, **TOLERANCE)
    else:
        assert (got == expected).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_cache_in_pages_and_reordered_gives_the_same(compiled: bool) -> None:
    call = flash_attn.flash_attn_with_kvcache
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    q, k_cache, v_cache, k, v = cache_call()
    lengths = torch.tensor(LENGTHS).int()
    order = torch.tensor([1, 0])
    page, n_pages = 16, CAPACITY // 16
    table = torch.tensor([5, 0, 3, 6, 1, 7, 4, 2]).int().view(2, n_pages)
    paged = [torch.empty(2 * n_pages, page, HEADS_KV, D_HEAD).half() for _ in range(2)]
    for pages, cache in zip(paged, (k_cache, v_cache), strict=True):
        pages[table.flatten()] = cache.view(-1, page, HEADS_KV, D_HEAD)
    reordered = [cache[order].clone() for cache in (k_cache, v_cache)]
    expected = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True
    )
    table[1, 1:] = -1  # not used by a sequence of 3
    got = call(q, *paged, k, v, cache_seqlens=lengths, block_table=table, causal=True)
    same(got, expected)
    assert (paged[0][table[0]].flatten(0, 1)[:20] == k_cache[0, :20]).all()
    got = call(q, *reordered, k, v, cache_seqlens=lengths, cache_batch_idx=order, causal=True)
    same(got, expected)
    torch.testing.assert_close(reordered[1], v_cache[order], equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("seqlens", [None, 9, [9, 9]])
def test_cache_without_new_keys(seqlens: int | list[int] | None) -> None:
    q, k_cache, v_cache = qkv(2, 12)
    n = 12 if seqlens is None else 9
    if isinstance(seqlens, list):
        seqlens = torch.tensor(seqlens).int()
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=seqlens)
    close(out, reference(q, k_cache[:, :n], v_cache[:, :n])[0])


@pytest.mark.only_on("cuda")
@pytest.mark.parametrize("paged", [False, True])
def test_lengths_change_between_replays_of_a_graph(paged: bool) -> None:
    """One graph, captured with other lengths, other new keys and another table than it is replayed with."""
    q, k_cache, v_cache, k, v = cache_call()
    lengths = torch.zeros(2, dtype=torch.int32)
    table = torch.arange(2 * CAPACITY // 16).int().view(2, -1) if paged else None
    caches = [cache.view(-1, 16, HEADS_KV, D_HEAD) if paged else cache for cache in (k_cache, v_cache)]

    def call() -> tuple[Tensor, ...]:
        return flash_attn.flash_attn_with_kvcache(
            q, *caches, k, v, cache_seqlens=lengths, block_table=table, causal=True, return_softmax_lse=True
        )

    call()  # the kernel is compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for i, now in enumerate(((17, 0), (60, 61), (1, 40))):
        for target, value in zip((k_cache, v_cache), qkv(NEW, CAPACITY)[1:], strict=True):
            target.copy_(value + i)
        k.copy_(random(2, NEW, HEADS_KV, D_HEAD) - i)
        lengths.copy_(torch.tensor(now))
        if table is not None:
            table.copy_(table.flip(0))  # the items of the batch change places in the cache
        items = [k_cache, v_cache] if table is None or i % 2 else [k_cache.flip(0), v_cache.flip(0)]
        expected_inputs = [cache.clone() for cache in items]
        graph.replay()
        for b, n in enumerate(now):
            keys = torch.cat((expected_inputs[0][b, :n], k[b]))[None]
            values = torch.cat((expected_inputs[1][b, :n], v[b]))[None]
            expected = reference(q[b : b + 1], keys, values, causal=True)
            close(out[b : b + 1], expected[0])
            close(lse[b : b + 1], expected[1])


def test_an_empty_cache_gives_zeros() -> None:
    q, k_cache, v_cache = qkv(2, 12)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=0, return_softmax_lse=True
    )
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary_turns_queries_and_new_keys_at_their_positions(interleaved: bool, causal: bool) -> None:
    q, k_cache, v_cache, k, v = cache_call()
    angles = torch.arange(CAPACITY)[:, None] * 10.0 ** -torch.arange(8)  # (seq_len_rotary, d_rotary / 2)
    cos, sin = angles.cos().half(), angles.sin().half()
    rotated_keys = []
    for i, n in enumerate(LENGTHS):  # by complex numbers, another way than the library's
        places = torch.arange(n, n + NEW)
        rotated_keys.append(turned(k[i], angles[places], interleaved))
    keys = grown(k_cache, torch.stack(rotated_keys).half())
    values = grown(v_cache, v)
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, torch.tensor(LENGTHS).int(), causal=causal,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    for i, n in enumerate(LENGTHS):
        places = torch.arange(n, n + NEW) if causal else torch.full((NEW,), n)
        query = turned(q[i], angles[places], interleaved).half()
        expected = reference(query[None], keys[i], values[i], causal=causal)
        torch.testing.assert_close(out[i : i + 1].double(), expected[0], atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(k_cache[i, n : n + NEW], keys[i][0, n:], atol=4e-3, rtol=4e-3)


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x (seq, heads, d) with its first 16 columns turned by angles (seq, 8)."""
    columns = torch.arange(16).view(8, 2) if interleaved else torch.arange(16).view(2, 8).T
    pairs = torch.view_as_complex(x.float()[..., columns].contiguous())
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    result = x.float().clone()
    result[..., columns] = torch.view_as_real(pairs)
    return result


def test_rotation_keeps_the_other_columns() -> None:
    x = random(1, 3, 2, D_HEAD)
    angles = torch.ones(3, 4)
    got = rotated(x, angles.cos(), angles.sin(), torch.arange(3)[None], True)
    assert (got[..., 8:] == x[..., 8:]).all()
    assert (got[..., :8] != x[..., :8]).any()


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": None}, "k and v must be given together"),
        ({"cache_seqlens": None}, "without cache_seqlens"),
        ({"cache_seqlens": torch.tensor([62, 0]).int()}, "holds 64 tokens"),
        ({"k": random(2, NEW, HEADS, D_HEAD)}, "k has shape"),
        ({"v": random(2, NEW + 1, HEADS_KV, D_HEAD)}, "one length"),
        ({"rotary_cos": torch.ones(64, 8)}, "rotary_cos and rotary_sin"),
        ({"rotary_cos": torch.ones(64, 17), "rotary_sin": torch.ones(64, 17)}, "rotary_cos has shape"),
        (
            {"block_table": torch.zeros(2, 4).int(), "cache_batch_idx": torch.zeros(2).int()},
            "name no item twice",
        ),
        ({"cache_seqlens": torch.zeros(3).int()}, r"shape \(3,\)"),
        ({"cache_batch_idx": torch.zeros(3).int()}, r"cache_batch_idx is torch.int32 of shape \(3,\)"),
        ({"block_table": torch.zeros(1, 4).int()}, r"block_table has shape \(1, 4\)"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(change: dict, text: str) -> None:
    q, k_cache, v_cache, k, v = cache_call()
    arguments = {"k": k, "v": v, "cache_seqlens": torch.tensor(LENGTHS).int(), **change}
    with pytest.raises(ValueError, match=text):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"q": None}, TypeError, "q is None"),
        ({"q": random(NEW, HEADS, D_HEAD)}, ValueError, r"q has shape \(3, "),
        ({"k_cache": None}, TypeError, "k_cache is None"),
        ({"k": [1], "v": [1]}, TypeError, "k is a list"),
        ({"cache_seqlens": [17, 0]}, TypeError, r"cache_seqlens is \[17, 0\]; it must be an int32 tensor"),
        ({"cache_seqlens": 1.5}, TypeError, "cache_seqlens is 1.5"),
        ({"cache_seqlens": -1}, TypeError, "cache_seqlens is -1"),
        ({"cache_seqlens": torch.tensor([3, -2]).int()}, ValueError, "cache_seqlens has -2"),
        (
            {"k_cache": random(1, 64, HEADS_KV, D_HEAD), "v_cache": random(1, 64, HEADS_KV, D_HEAD)},
            ValueError,
            "q has 2 batch items, k_cache and v_cache 1; they need at least as many",
        ),
        ({"cache_batch_idx": [0, 1]}, TypeError, "cache_batch_idx is a list"),
        (
            {"cache_batch_idx": torch.tensor([0, 2])},
            ValueError,
            "cache_batch_idx has 2; k_cache has the items 0",
        ),
        ({"cache_batch_idx": torch.tensor([0, 2**32])}, ValueError, "cache_batch_idx has 4294967296"),
        ({"cache_batch_idx": torch.tensor([1, 1])}, ValueError, r"is \[1, 1\], and k and v are appended"),
        (
            {"cache_batch_idx": torch.tensor([0, 2**32]), "k": None, "v": None},
            ValueError,
            "cache_batch_idx has 4294967296",
        ),
        ({"cache_seqlens": 2**40}, TypeError, "cache_seqlens is 1099511627776; it must be"),
        ({"rotary_interleaved": "False"}, TypeError, "rotary_interleaved is 'False'"),
        (
            {"rotary_cos": torch.ones(64, 8, device="meta"), "rotary_sin": torch.ones(64, 8)},
            ValueError,
            "rotary_cos is on meta, q on cpu",
        ),
        ({"num_splits": np.ones(2)}, TypeError, "num_splits is an ndarray"),
        ({"rotary_cos": [1], "rotary_sin": [1]}, TypeError, "rotary_cos is a list"),
        ({"causal": "no"}, TypeError, "causal is 'no'; it must be True or False"),
        ({"softmax_scale": "0.5"}, TypeError, "softmax_scale is '0.5'"),
        ({"q": random(2, 1, 3, D_HEAD)}, ValueError, "q has 3 heads"),
        (
            {"rotary_cos": torch.ones(19, 8), "rotary_sin": torch.ones(19, 8)},
            ValueError,
            "have 19 rows, and positions up to 19 are turned: give at least 20",
        ),
    ],
)
def test_what_is_no_cache_is_named(change: dict, error: type[Exception], text: str) -> None:
    q, k_cache, v_cache, k, v = cache_call()
    arguments = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    before = k_cache.clone(), v_cache.clone()
    with pytest.raises(error, match=text):
        flash_attn.flash_attn_with_kvcache(
            **{**arguments, "cache_seqlens": torch.tensor(LENGTHS).int(), **change}
        )
    unchanged((k_cache, v_cache), before)  # refused before it is appended to


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("page", [-1, 3])
def test_nothing_is_appended_to_a_page_that_is_not_there(page: int) -> None:
    cache, new = torch.zeros(3, 16, 2, D_HEAD, dtype=torch.float16), torch.ones(1, 1, 2, D_HEAD).half()
    full, table = torch.tensor([16]).int(), torch.tensor([[0, page]]).int()
    with pytest.raises(ValueError, match=rf"block_table\[0, 1\] is {page}.* the pages 0 to 2"):
        flash_attn.flash_attn_with_kvcache(
            new, cache, cache.clone(), new, new, cache_seqlens=full, block_table=table
        )
    assert (cache == 0).all()


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"cache_seqlens": torch.tensor([4, -1]).int()}, "cache_seqlens has a count below 0"),
        ({"cache_batch_idx": torch.tensor([0, -1]).int()}, "names an item that k_cache does not have"),
        ({"cache_batch_idx": torch.tensor([0, -1])}, "names an item that k_cache does not have"),
        ({"cache_batch_idx": torch.tensor([0, 2**32])}, "names an item that k_cache does not have"),
        (
            {
                "block_table": torch.tensor([[0, 1], [2, -1]]).int(),
                "cache_seqlens": torch.tensor([4, 70]).int(),
            },
            "the table of pages names a page that k_cache and v_cache do not have",
        ),
        (
            {"block_table": torch.tensor([[0, 1], [-1, 2]]).int()},
            "the table of pages names a page that k_cache and v_cache do not have",
        ),
    ],
    ids=str,
)
@pytest.mark.only_on("cpu")
def test_compiled_calls_append_nothing_from_the_end(place: dict, said: str) -> None:
    """They read no numbers, and assert: PyTorch takes -1 for the last one."""
    q, k_cache, v_cache, k, v = cache_call()
    before = k_cache.clone(), v_cache.clone()
    compiled = torch.compile(flash_attn.flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=said):
        compiled(q, k_cache, v_cache, k, v, **{"cache_seqlens": torch.tensor([4, 5]).int()} | place)
    unchanged((k_cache, v_cache), before)


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(
    "place",
    [{}, {"cache_batch_idx": torch.tensor([1, 0])}, {"block_table": torch.tensor([[1], [0]]).int()}],
    ids=str,
)
def test_a_call_that_is_recorded_reads_no_numbers(place: dict) -> None:
    def call(*tensors: Tensor) -> Tensor:
        q, k_cache, v_cache, k, v, lengths, *where = tensors
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, **dict(zip(place, where, strict=True))
        )

    given = [*cache_call(), torch.tensor([0, 17]).int() if place else torch.tensor(LENGTHS).int()]
    given += place.values()
    expected = call(*(x.clone() for x in given))
    with FakeTensorMode() as mode:
        fake = call(*map(mode.from_tensor, given))
        assert (fake.shape, fake.stride(), fake.dtype) == (expected.shape, expected.stride(), expected.dtype)
    for tracing_mode in ("real", "symbolic"):
        graph = make_fx(call, tracing_mode=tracing_mode)(*(x.clone() for x in given))
        assert (graph(*(x.clone() for x in given)) == expected).all()


@pytest.mark.only_on("cpu")
def test_a_place_in_a_page_is_written_for_one_item_only() -> None:
    q, k_cache, v_cache, k, v = cache_call()
    table = torch.tensor([[1], [1]]).int()
    lengths = torch.tensor([5, 7]).int()
    with pytest.raises(ValueError, match="has page 1 for two batch items that both append to its row 7"):
        flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table
        )
    lengths = torch.tensor([5, 5 + NEW]).int()
    flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table)
    assert (k_cache[1, 5 : 5 + 2 * NEW] == k.flatten(0, 1)).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_cache_has_room_for_more_items_than_a_call_has(compiled: bool) -> None:
    q, k_cache, v_cache, k, v = cache_call()
    call = flash_attn.flash_attn_with_kvcache
    if compiled:
        torch._dynamo.reset()  # what other tests compiled of this function counts towards its limit
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    lengths = torch.tensor(LENGTHS).int()
    expected_caches = k_cache.clone(), v_cache.clone()
    expected = call(q, *expected_caches, k, v, cache_seqlens=lengths)
    larger = [torch.cat((cache, torch.full_like(cache, 7))) for cache in (k_cache, v_cache)]
    assert (call(q, *larger, k, v, cache_seqlens=lengths) == expected).all()
    for cache, expected_cache in zip(larger, expected_caches, strict=True):
        unchanged(cache[:2], expected_cache)
        assert (cache[2:] == 7).all()


def test_lengths_of_any_stride() -> None:
    q, k_cache, v_cache, _, _ = cache_call()
    lengths = torch.tensor([LENGTHS, LENGTHS]).int().T.contiguous()[:, 0]
    assert lengths.stride() == (2,)
    got = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths)
    contiguous = lengths.contiguous()
    assert (got == flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=contiguous)).all()


@pytest.mark.only_on("cpu")
def test_caches_that_are_written_have_memory_of_their_own() -> None:
    q, k_cache, v_cache, k, v = cache_call()
    lengths = torch.tensor(LENGTHS).int()
    call = flash_attn.flash_attn_with_kvcache
    with pytest.raises(ValueError, match="k_cache and v_cache overlap"):
        call(q, k_cache, k_cache, k, v, cache_seqlens=lengths)
    shared = v_cache[:1].expand(v_cache.shape)
    with pytest.raises(ValueError, match="elements of v_cache share memory"):
        call(q, k_cache, shared, k, v, cache_seqlens=lengths)
    expected = call(q, k_cache, shared.clone(), cache_seqlens=lengths)
    assert torch.equal(call(q, k_cache, shared, cache_seqlens=lengths), expected)  # read, they may
    both = torch.stack((k_cache, v_cache), 2)
    expected = call(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    assert torch.equal(call(q, *both.unbind(2), k, v, cache_seqlens=lengths), expected)
    written = torch.stack((k_cache, v_cache), 2)
    torch.testing.assert_close(both, written, rtol=0, atol=0, equal_nan=True)


@pytest.mark.only_on("cpu")
def test_host_numbers_in_tensors_and_arrays_are_taken() -> None:
    q, k, v = (x[0] for x in qkv(6, 6))
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    expected = flash_attn.flash_attn_varlen_func(q, k, v, offsets, offsets, 4, 4, window_size=(2, 0))
    for number in (torch.tensor, np.int64):
        window, longest = (number(2), number(0)), number(4)
        found = flash_attn.flash_attn_varlen_func(
            q, k, v, offsets, offsets, longest, longest, window_size=window
        )
        assert torch.equal(found, expected)


@pytest.mark.only_on("cpu")
def test_nested_tensors_are_named() -> None:
    q, k, v = qkv(4, 4)
    nested = torch.nested.nested_tensor([q[0]])
    with pytest.raises(TypeError, match="q is a nested tensor"):
        flash_attn.flash_attn_func(nested, k, v)
    with pytest.raises(TypeError, match="k_cache is a nested tensor"):
        flash_attn.flash_attn_with_kvcache(q, nested, v)


@pytest.mark.only_on("cpu")
def test_a_packed_input_of_another_shape_is_named() -> None:
    q, k, _ = qkv(4, 4)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match="kv is a list"):
        flash_attn.flash_attn_kvpacked_func(q, [k, k])
    with pytest.raises(ValueError, match=r"must be \(batch, seq_len_k, 2, n_heads_kv, d_head\)"):
        flash_attn.flash_attn_kvpacked_func(q, torch.stack((k[0], k[0]), 1))
    with pytest.raises(ValueError, match=r"must be \(batch, seq_len, 3, n_heads, d_head\)"):
        flash_attn.flash_attn_qkvpacked_func(torch.stack((k, k), 2))
    with pytest.raises(ValueError, match=r"must be \(total_k, 2, n_heads_kv, d_head\)"):
        flash_attn.flash_attn_varlen_kvpacked_func(q[0], torch.stack((k, k), 2), offsets, offsets, 4, 4)
    with pytest.raises(ValueError, match=r"must be \(total, 3, n_heads, d_head\)"):
        flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack((k, k, k), 2), offsets, 4)


@pytest.mark.parametrize("paged", [False, True])
def test_tokens_appended_one_by_one_are_those_appended_at_once(paged: bool) -> None:
    _, k_cache, v_cache, k, v = cache_call()
    table = torch.tensor([[1, 3, 0, 2], [4, 6, 7, 5]], dtype=torch.int32) if paged else None
    if paged:
        k_cache, v_cache = (x.reshape(8, CAPACITY // 4, *x.shape[2:]).clone() for x in (k_cache, v_cache))
    q = random(2, 1, HEADS, D_HEAD)
    at_once = k_cache.clone(), v_cache.clone()
    lengths = torch.tensor(LENGTHS).int()
    flash_attn.flash_attn_with_kvcache(q, *at_once, k, v, cache_seqlens=lengths, block_table=table)
    for i in range(NEW):
        new = k[:, i : i + 1], v[:, i : i + 1]
        flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, *new, cache_seqlens=lengths + i, block_table=table
        )
    for one, other in zip((k_cache, v_cache), at_once, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
        assert not torch.equal(one.nan_to_num(7.0), torch.full_like(one, 7.0))


@pytest.mark.only_on("cpu")
def test_block_table_of_another_type() -> None:
    q, k_cache, v_cache, *_ = cache_call()
    lengths = torch.tensor(LENGTHS).int()
    with pytest.raises(TypeError, match=r"block_table is torch\.float32"):
        flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, block_table=torch.zeros(2, 4)
        )


def test_pages_of_24_tokens() -> None:
    q, k_cache, v_cache = qkv(1, 24)
    table = torch.tensor([[1], [0]]).int()
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, block_table=table)
    close(out, reference(q, k_cache.flip(0), v_cache.flip(0))[0])


# ---------------------------------------------------------------------- what kernels do not take
def test_head_sizes_between_multiples_of_8() -> None:
    q, k, v = random(2, 9, HEADS, 59), random(2, 20, HEADS_KV, 59), random(2, 20, HEADS_KV, 59)
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    expected = reference(q, k, v, causal=True)  # with the scale 59 ** -0.5
    close(out, expected[0])
    close(lse, expected[1])
    offsets = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([0, 20], dtype=torch.int32)
    packed = flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], *offsets, 9, 20, causal=True)
    alone = flash_attn.flash_attn_func(q, k, v, causal=True)
    close(alone, expected[0])
    assert (packed == alone[0]).all()


def test_a_cache_whose_head_size_is_between_multiples_of_8_is_written_too() -> None:
    q, new = random(1, 1, HEADS, 59), random(1, 1, HEADS_KV, 59)
    k_cache, v_cache = random(1, 16, HEADS_KV, 59), random(1, 16, HEADS_KV, 59) + 1
    keys, values = (torch.cat((cache[:, :7], new), 1) for cache in (k_cache, v_cache))
    rest = k_cache[:, 8:].clone()
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=7)
    close(out, reference(q, keys, values)[0])
    assert (k_cache[:, :8] == keys).all()
    assert (v_cache[:, :8] == values).all()
    assert (k_cache[:, 8:] == rest).all()


def test_a_window_may_be_a_tensor() -> None:
    q, k, v = qkv(9, 20)
    out = flash_attn.flash_attn_func(q, k, v, window_size=torch.tensor([5, -1]))
    assert (out == flash_attn.flash_attn_func(q, k, v, window_size=(5, -1))).all()


@pytest.mark.parametrize("window", [3, (1, 2, 3), ("a", 0), None, (None, 0)])
def test_a_window_that_is_none_is_refused_by_name(window: object) -> None:
    q = torch.zeros(1, 8, 2, 16, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"window_size is .*; it must be two whole numbers \(left, right\)"):
        flash_attn.flash_attn_func(q, q, q, window_size=window)
