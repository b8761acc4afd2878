"""Counts of keys or queries beyond what there is room for are cut down to it, and so are places that follow
from them: each call has the bits of the call with counts that fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention import flash_attn_interface as flash_attn_2
from flash_attention.integrations import flash_attn_3, vllm

pytestmark = pytest.mark.only_on("cpu")  # over caches no kernel of a GPU has functions
INT = torch.int32
HEADS, HEADS_KV, D, ROOM = 4, 2, 32, 20
KEYS = (ROOM, 13)  # of packed sequences


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=INT)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
CACHES = random(2, ROOM, HEADS_KV, D), random(2, ROOM, HEADS_KV, D).neg()
PAGES = tuple(x.view(10, 4, HEADS_KV, D) for x in CACHES)
TABLE = torch.arange(10, dtype=INT).view(2, 5)
PACKED = tuple(x.flatten(0, 1)[: sum(KEYS)] for x in CACHES)
ENDS_K, ENDS_Q = ints(0, ROOM, sum(KEYS)), ints(0, 6, 9)


def flash_attn_2_cache(counts: Tensor, **options: Any) -> Any:
    q = random(2, 3, HEADS, D)
    return flash_attn_2.flash_attn_with_kvcache(
        q, *CACHES, cache_seqlens=counts, return_softmax_lse=True, **options
    )


def flash_attn_2_pages(counts: Tensor, **options: Any) -> Any:
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return flash_attn_2.flash_attn_varlen_func(
        random(9, HEADS, D), *PAGES, ENDS_Q, ends, 6, int(counts.max()), block_table=TABLE,
        return_attn_probs=True, **options,
    )  # fmt: skip


def flash_attn_3_cache(counts: Tensor, **options: Any) -> Any:
    q = random(2, 3, HEADS, D)
    caches = PAGES if "page_table" in options else CACHES
    return flash_attn_3.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=counts, return_softmax_lse=True, **options
    )


def flash_attn_3_packed(counts: Tensor, **options: Any) -> Any:
    return flash_attn_3.flash_attn_varlen_func(
        random(9, HEADS, D),
        *PACKED,
        ENDS_Q,
        ENDS_K,
        6,
        ROOM,
        seqused_k=counts,
        return_attn_probs=True,
        **options,
    )


def vllm_pages(counts: Tensor, **options: Any) -> Any:
    return vllm.flash_attn_varlen_func(
        random(9, HEADS, D), *PAGES, 6, ENDS_Q, ROOM, seqused_k=counts, block_table=TABLE,
        alibi_slopes=SLOPES, return_softmax_lse=True, **options,
    )  # fmt: skip


def vllm_cache(counts: Tensor, **options: Any) -> Any:
    return vllm.flash_attn_varlen_func(
        random(9, HEADS, D), *CACHES, 6, ENDS_Q, ROOM, seqused_k=counts, alibi_slopes=SLOPES,
        return_softmax_lse=True, **options,
    )  # fmt: skip


def vllm_packed(counts: Tensor, **options: Any) -> Any:
    return vllm.flash_attn_varlen_func(
        random(9, HEADS, D), *PACKED, 6, ENDS_Q, ROOM, ENDS_K, seqused_k=counts, alibi_slopes=SLOPES,
        return_softmax_lse=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(
    ("call", "options"),
    [
        (flash_attn_2_cache, {"alibi_slopes": SLOPES}),
        (flash_attn_2_cache, {"alibi_slopes": SLOPES, "num_splits": 2}),
        (flash_attn_2_cache, {"cache_leftpad": ints(4, 2)}),
        (flash_attn_2_cache, {"cache_leftpad": ints(4, 2), "alibi_slopes": SLOPES}),
        (flash_attn_2_pages, {"alibi_slopes": SLOPES}),
        (flash_attn_3_cache, {"cache_leftpad": ints(4, 2)}),
        (flash_attn_3_cache, {"cache_leftpad": ints(4, 2), "page_table": TABLE}),
        (flash_attn_3_cache, {"attention_chunk": 8}),
        (flash_attn_3_cache, {"attention_chunk": 8, "page_table": TABLE, "cache_leftpad": ints(4, 2)}),
        (flash_attn_3_packed, {"attention_chunk": 8}),
        (vllm_pages, {}),
        (vllm_cache, {}),
        (vllm_packed, {}),
    ],
    ids=lambda x: x.__name__ if callable(x) else "+".join(x),
)
def test_counts_of_keys(call: Callable[..., Any], options: dict[str, Any], causal: bool) -> None:
    fits = ROOM if call not in (flash_attn_3_packed, vllm_packed) else KEYS[0]
    expected = call(ints(fits, 13), causal=causal, **options)
    found = call(ints(fits + 5, 13), causal=causal, **options)
    assert expected[0].abs().sum() > 0
    assert all(map(torch.equal, found[:2], expected[:2]))


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_counts_of_queries(causal: bool) -> None:
    counts_q, counts_k = (6, 2), ints(20, 11)
    expected, found = (
        flash_attn_3_packed(counts_k, seqused_q=ints(*q), attention_chunk=8, causal=causal)
        for q in (counts_q, (9, 2))
    )
    assert expected[0].abs().sum() > 0
    assert all(map(torch.equal, found[:2], expected[:2]))
