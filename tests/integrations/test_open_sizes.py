"""Programs that hold every size open, head sizes and heads too: ``torch.compile(dynamic=True)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention import attention, attention_varlen, sdpa
from flash_attention.cached import attention_cached
from flash_attention.flash_attn_interface import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attention.flex_attention import flex_attention

pytestmark = [pytest.mark.only_on("cpu"), pytest.mark.filterwarnings("ignore")]
OFFSETS = torch.tensor([0, 30, 80], dtype=torch.int32)
USED = torch.tensor([3, 40], dtype=torch.int32)
SHAPES = ((2, 40, 4, 32), (2, 40, 4, 64), (2, 40, 4, 48))


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "attention": lambda q, k, v: attention(q, k, v, causal=True, softmax_scale=q.shape[-1] ** -0.5),
    "a sum with a difference of lengths": lambda q, k, v: attention(
        q, k, v, mask_mod=lambda b, h, i, j: i + (k.shape[1] - q.shape[1]) >= j
    ),
    "a quotient of lengths": lambda q, k, v: attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s ** (1 + q.shape[1] // k.shape[1]) + i / q.shape[1]
    ),
    "sdpa": lambda q, k, v: sdpa(*heads_first(q, k, v), is_causal=True),
    "sdpa, a mask": lambda q, k, v: sdpa(
        *heads_first(q, k, v), torch.ones(q.shape[1], k.shape[1]).tril().bool()
    ),
    "flex_attention": lambda q, k, v: flex_attention(*heads_first(q, k, v), block_mask=causal),
    "flex_attention, grouped heads": lambda q, k, v: flex_attention(
        *heads_first(q, k[:, :, :2], v[:, :, :2]), lambda s, b, h, i, j: s + h, enable_gqa=True
    ),
    "packed": lambda q, k, v: attention_varlen(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), OFFSETS, OFFSETS, 50, 50
    ),
    "cached": lambda q, k, v: attention_cached(q, k, v, USED),
    "flash_attn_func, slopes": lambda q, k, v: flash_attn_func(
        q, k, v, causal=True, alibi_slopes=torch.ones(4)
    ),
    "flash_attn_func, slopes of items": lambda q, k, v: flash_attn_func(
        q, k, v, alibi_slopes=torch.ones(q.shape[0], q.shape[2])
    ),
    "flash_attn_qkvpacked_func": lambda q, k, v: flash_attn_qkvpacked_func(torch.stack((q, k, v), 2)),
    "flash_attn_with_kvcache": lambda q, k, v: flash_attn_with_kvcache(q, k, v, cache_seqlens=USED),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_same_as_at_once(name: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="eager", dynamic=True)
    generator = torch.Generator().manual_seed(0)
    for shape in SHAPES:
        q, k, v = (torch.randn(shape, generator=generator).half() for _ in range(3))
        assert torch.equal(compiled(q, k, v), CALLS[name](q, k, v)), shape
    torch._dynamo.reset()


MASKS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "a sum": lambda n: lambda b, h, q, k: q + n > 2 * k,
    "on the left": lambda n: lambda b, h, q, k: (n - q > k) | (n * q >= k * n - 3),
    "a remainder": lambda n: lambda b, h, q, k: (q * 7) % n >= k - n // 2,
    "an operand of functions": lambda n: (
        lambda b, h, q, k: (torch.where(q > k, n, 0) >= k) & (torch.clamp(q, 0, n // 2) >= k - 3)
    ),
    "no difference": lambda n: lambda b, h, q, k: q + (n - n) >= k,
}


class OfLength(torch.nn.Module):
    """A mask that computes with a length."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, mask_mod=MASKS[self.name](q.shape[1]))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_exported_masks_that_compute_with_a_length(name: str, strict: bool) -> None:
    def inputs(seq_len: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(2, seq_len, 4, 32).half() for _ in range(3))

    module = OfLength(name)
    length = torch.export.Dim("length", min=2, max=60)
    exported = torch.export.export(
        module, inputs(24), dynamic_shapes=({1: length},) * 3, strict=strict
    ).module()
    for seq_len in (24, 33, 9):
        q, k, v = inputs(seq_len)
        assert torch.equal(exported(q, k, v), module(q, k, v))
