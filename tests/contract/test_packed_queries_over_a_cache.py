"""Lines C70 to C73 of docs/contract.md: packed queries over a cache of keys."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention import attention, attention_varlen
from flash_helpers.test.utils import ramp, reference

HALF, INT = torch.float16, torch.int32
QUERIES, KEYS = (70, 1, 0, 4, 1, 1), (130, 96, 17, 4, 0, 33)
CAPACITY = 144
OPTIONS: dict[str, dict[str, Any]] = {
    "everything": {},
    "causal": {"causal": True},
    "window": {"window": (20, 5)},
    "before": {"window": (40, -3)},
    "softcap": {"softcap": 3.0, "causal": True},
    "scale": {"softmax_scale": -0.2},
    "offset": {"causal": True, "diagonal_offset": -2},
}


def ints(numbers: Any, device: str) -> Tensor:
    return torch.tensor(numbers, dtype=INT, device=device)


def ends(lengths: tuple[int, ...], device: str) -> Tensor:
    return ints([0, *accumulate(lengths)], device)


class Cache:
    """Keys and values of sequences, and the same in the forms that a call takes."""

    def __init__(self, device: str, form: int | str, keys: tuple[int, ...] = KEYS) -> None:
        shape = (len(keys), CAPACITY, 2, 64)
        self.keys, self.dense = keys, [ramp(shape, n, HALF, device) for n in (7, 11)]
        self.options: dict[str, Any] = {"seqused_k": ints(keys, device)}
        self.cu_seqlens_k: Tensor | None = None
        self.k, self.v = (x.clone() for x in self.dense)
        used = torch.arange(CAPACITY, device=device) < self.options["seqused_k"][:, None]
        for x in (self.k, self.v):
            x[~used] = math.nan  # nobody has these
        if form == "packed":
            self.k, self.v = (x.flatten(0, 1) for x in (self.k, self.v))
            self.cu_seqlens_k = torch.arange(len(keys) + 1, dtype=INT, device=device) * CAPACITY
        elif form != "batch":
            assert isinstance(form, int)
            n = -(-CAPACITY // form)
            pad = (0, 0, 0, 0, 0, n * form - CAPACITY)
            self.k, self.v = (
                torch.nn.functional.pad(x, pad, value=math.nan).reshape(-1, form, 2, 64).flip(0)
                for x in (self.k, self.v)
            )
            table = torch.arange(len(keys) * n - 1, -1, -1, dtype=INT, device=device).view(len(keys), n)
            for item, count in enumerate(keys):
                table[item, -(-count // form) :] = -12345
            self.options["block_table"] = table

    def of(self, sequence: int) -> tuple[Tensor, Tensor]:
        k, v = (x[sequence : sequence + 1, : self.keys[sequence]] for x in self.dense)
        return k, v


def call(q: Tensor, cache: Cache, queries: tuple[int, ...] = QUERIES, **options: Any) -> Any:
    longest = max(queries, default=0)
    positions = ends(queries, q.device.type), cache.cu_seqlens_k, longest, CAPACITY
    return attention_varlen(q, cache.k, cache.v, *positions, **cache.options, **options)


def compared(
    out: Tensor, lse: Tensor, rows: slice, q: Tensor, kv: tuple[Tensor, Tensor], **options: Any
) -> None:
    expected, expected_lse = reference(q[None, rows], *kv, **options)
    torch.testing.assert_close(out[rows].double(), expected[0], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse[:, rows].double(), expected_lse[0], atol=1e-3, rtol=2e-6)


def begins(queries: tuple[int, ...]) -> list[int]:
    return [0, *accumulate(queries)]


# ---------------------------------------------------------------------- C70
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("form", ["batch", "packed", 16, 48, 5, 1])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_c70_each_sequence_is_computed_alone(device, options, form, sinks):
    q, cache = ramp((sum(QUERIES) + 3, 4, 64), 5, HALF, device), Cache(device, form)
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device) if sinks else None
    out, lse = call(q, cache, sinks=logits, return_lse=True, **options)
    for i, begin in enumerate(begins(QUERIES)[:-1]):
        rows = slice(begin, begin + QUERIES[i])
        if QUERIES[i]:
            compared(out, lse, rows, q, cache.of(i), sinks=logits, **options)
    assert (out[-3:] == 0).all()
    assert (lse[:, -3:] == -math.inf).all()


@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_c70_heads_of_a_group(device, group):
    q, cache = ramp((sum(QUERIES), 2 * group, 64), 5, HALF, device), Cache(device, 16)
    out, lse = call(q, cache, causal=True, return_lse=True)
    for i, begin in enumerate(begins(QUERIES)[:-1]):
        if QUERIES[i]:
            compared(out, lse, slice(begin, begin + QUERIES[i]), q, cache.of(i), causal=True)


def test_c70_counts_beyond_the_capacity_are_cut_down_to_it(device):
    q = ramp((2, 4, 64), 5, HALF, device)
    for form in ("batch", 16):
        cache = Cache(device, form, keys=(CAPACITY, CAPACITY))
        cache.options["seqused_k"] += ints((0, 1000), device)
        positions = ints((0, 1, 2), device), None, 1, 10**6
        out = attention_varlen(q, cache.k, cache.v, *positions, **cache.options)
        expected = torch.cat([reference(q[None, i : i + 1], *cache.of(i))[0][0] for i in range(2)])
        torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_c70_nothing_to_see(device, sinks):
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device) if sinks else None
    q = ramp((7, 4, 64), 5, HALF, device)
    k = q.new_empty(0, 16, 2, 64)
    none, table = ints((0, 0), device), torch.zeros(2, 3, dtype=INT, device=device)
    options = {"seqused_k": none, "block_table": table, "sinks": logits, "return_lse": True}
    used = ints((2, 1), device)
    out, lse = attention_varlen(q, k, k, ints((0, 4, 6), device), None, 4, 48, seqused_q=used, **options)
    assert (out == 0).all()
    counts = torch.tensor([1, 1, 0, 0, 1, 0, 0], dtype=torch.bool)
    assert (lse[:, ~counts] == -math.inf).all()
    expected = torch.full((4, 3), -math.inf) if logits is None else logits.cpu()[:, None].expand(4, 3)
    assert torch.equal(lse[:, counts].cpu(), expected)
    nobody = ints((0,), device)
    out = attention_varlen(q, k, k, nobody, None, 0, 48, seqused_k=none[:0], block_table=table[:0])
    assert (out == 0).all()


# ---------------------------------------------------------------------- C71
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("form", ["batch", "packed", 16, 5])
def test_c71_queries_that_do_not_count_are_padding(device, form, sinks):
    used = (66, 1, 0, 2, 0, 9)
    q, cache = ramp((sum(QUERIES), 4, 64), 5, HALF, device), Cache(device, form)
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device) if sinks else None
    counts = ints(used, device)
    out, lse = call(q, cache, causal=True, seqused_q=counts, sinks=logits, return_lse=True)
    for i, begin in enumerate(begins(QUERIES)[:-1]):
        n = min(used[i], QUERIES[i])
        if n:
            compared(out, lse, slice(begin, begin + n), q, cache.of(i), causal=True, sinks=logits)
        assert (out[begin + n : begin + QUERIES[i]] == 0).all()
        assert (lse[:, begin + n : begin + QUERIES[i]] == -math.inf).all()


# ---------------------------------------------------------------------- C72
@pytest.mark.parametrize("n_splits", [None, 1, 3, 256])
def test_c72_parts_change_no_more_than_rounding(device, n_splits):
    q, cache = ramp((sum(QUERIES), 4, 64), 5, HALF, device), Cache(device, 16)
    out, lse = call(q, cache, causal=True, n_splits=n_splits, return_lse=True)
    for i, begin in enumerate(begins(QUERIES)[:-1]):
        if QUERIES[i]:
            compared(out, lse, slice(begin, begin + QUERIES[i]), q, cache.of(i), causal=True)


def test_c72_lengths_of_others_change_no_bit(device):
    q, cache = ramp((sum(QUERIES), 4, 64), 5, HALF, device), Cache(device, 16, keys=(CAPACITY,) * 6)
    first = call(q, cache, causal=True, return_lse=True)
    for one, begin in enumerate(begins(QUERIES)[:-1]):
        cache.options["seqused_k"] = ints([CAPACITY if i == one else 5 * i for i in range(6)], device)
        rows = slice(begin, begin + QUERIES[one])
        out, lse = call(q, cache, causal=True, return_lse=True)
        assert torch.equal(out[rows], first[0][rows])
        assert torch.equal(lse[:, rows], first[1][:, rows])


@pytest.mark.parametrize(
    ("n_splits", "error", "words"),
    [(0, ValueError, "n_splits is 0; it must be 1 to 256"), (True, TypeError, "n_splits is True"),
     (257, ValueError, "n_splits is 257"), (2.0, TypeError, "n_splits is 2.0; it must be an int")],
)  # fmt: skip
def test_c72_other_numbers_of_parts_are_refused(device, n_splits, error, words):
    with pytest.raises(error, match=words):
        call(ramp((sum(QUERIES), 4, 64), 5, HALF, device), Cache(device, 16), n_splits=n_splits)


# ---------------------------------------------------------------------- C73
def test_c73_what_does_not_fit_is_refused_by_name(device):
    q, cache = ramp((sum(QUERIES), 4, 64), 5, HALF, device), Cache(device, 16)
    positions, counts = (ends(QUERIES, device), None, max(QUERIES), CAPACITY), cache.options["seqused_k"]
    table = cache.options["block_table"]

    def refused(words: str, error: type[Exception] = ValueError, **changes: Any) -> None:
        given = {"seqused_k": counts, "block_table": table, "validate": True, **changes}
        at = given.pop("at", positions)
        with pytest.raises(error, match=words):
            attention_varlen(q, given.pop("k", cache.k), given.pop("v", cache.v), *at, **given)

    offsets = ends(KEYS, device)
    refused("cu_seqlens_k is None, and so is seqused_k", seqused_k=None)
    refused(
        r"q must be \(total, heads, d\), and k and v .*need cu_seqlens_k",
        k=cache.k.flatten(0, 1), v=cache.v.flatten(0, 1), block_table=None,
    )  # fmt: skip
    refused("block_table and cu_seqlens_k are both given", at=(positions[0], offsets, 70, 130),
            k=cache.k.flatten(0, 1), v=cache.v.flatten(0, 1))  # fmt: skip
    refused(r"k and v have \d+ sequences, cu_seqlens_q 6", block_table=None)
    refused(r"seqused_k has shape \(5,\); it must be \(6,\)", seqused_k=counts[:5])
    refused(r"seqused_q has shape \(7,\); it must be \(6,\)", seqused_q=ints([1] * 7, device))
    refused(r"block_table has shape \(2, 9\); it must be \(6, max_pages\)", block_table=table[:2])
    refused("seqused_k is torch.int64", TypeError, seqused_k=counts.long())
    refused("seqused_k has -1; a count of keys", seqused_k=counts - 1)
    refused("seqused_q has -1; a count of queries", seqused_q=counts - 1)
    refused("seqused_k has 130; max_seqlen_k is 100, .*: pass at least 130", at=(*positions[:3], 100))
    refused(r"block_table\[0, 0\] is -12345, and that page holds keys", block_table=table * 0 - 12345)
    refused(
        "longest sequence by cu_seqlens_q has 70 rows; .* is 60: pass at least 70",
        at=(positions[0], None, 60, CAPACITY),
    )


def test_c73_no_gradient(device):
    q, cache = ramp((sum(QUERIES), 4, 64), 5, HALF, device).requires_grad_(), Cache(device, "batch")
    with pytest.raises(NotImplementedError, match=r"packed queries with seqused_k have none"):
        call(q, cache)
    with torch.no_grad():
        assert not call(q, cache).requires_grad


def test_c73_batches_name_the_function_that_takes_it():
    q = torch.zeros(1, 1, 1, 64, dtype=HALF)
    with pytest.raises(TypeError, match="attention_varlen takes a cache of keys in pages"):
        attention(q, q, q, block_table=None)  # type: ignore[call-overload]
