"""Masks of documents, the inputs of their calls, and what comes out of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attention import last_kernel

SEQ, HEADS, D = 900, 4, 64
NUMBERS = torch.repeat_interleave(torch.arange(4), torch.tensor([333, 1, 210, 356]))
Mask = Callable[..., Any]


def inputs(batch: int) -> list[Tensor]:
    """q, k, v and a gradient of the output, on the CPU."""
    generator = torch.Generator("cpu").manual_seed(batch)
    shape = (batch, SEQ, HEADS, D)
    return [torch.randn(shape, generator=generator, device="cpu").half() for _ in range(4)]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def of_all(document: Tensor) -> Mask:
    return lambda b, h, q, k: document[q] == document[k]


def of_items(document: Tensor) -> Mask:
    return lambda b, h, q, k: document[b, q] == document[b, k]


def windowed(document: Tensor) -> Mask:
    return lambda b, h, q, k: (document[q] == document[k]) & (q - k <= 70) & (k - q <= 9)


def within(document: Tensor) -> Mask:
    """Places that are counted from where the document begins, as attention-gym's are."""
    begins = torch.tensor([0, 333, 334, 544], device=document.device)

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        i, j = q - begins[document[q]], k - begins[document[k]]
        return (document[q] == document[k]) & (i >= j) & (i - j <= 200)

    return mask


def right(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Output and LSE, in float64."""
    place = torch.arange(SEQ, device="cpu")
    item = torch.arange(len(q), device="cpu")[:, None, None, None]
    seen = mask(item, 0, place[:, None], place)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / math.sqrt(D)
    scores = scores.masked_fill(~seen, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double()), scores.logsumexp(-1)


def is_packed() -> bool:
    return last_kernel().traits.varlen and last_kernel().mod is None
