"""Tiny launches of Hopper's forward kernels with functions, for NVIDIA's compute-sanitizer.

::

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitizer_functions.py

Run it once without the tool before, which compiles the kernels. Racecheck wants the flag that
``tests/gpu/sanitizer.py`` names. What kernels write is compared with float64, on the CPU.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch
from torch import Tensor

import flash_attention

HEADS, LENGTH, TOLERANCE = 2, 320, 2e-2
SLOPES = torch.tensor([0.5, -0.1])
TABLE = torch.randn(HEADS, 32, generator=torch.Generator().manual_seed(2))
BIAS = torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)).bfloat16()


def alibi(device: str) -> Callable[..., Any]:
    slopes = SLOPES.to(device)
    return lambda s, b, h, q, k: s + slopes[h] * (k - q)


def buckets(device: str) -> Callable[..., Any]:
    table = TABLE.to(device)
    return lambda s, b, h, q, k: s + table[h, torch.clamp(torch.abs(q - k), max=31)]


def bias(device: str) -> Callable[..., Any]:
    values = BIAS.to(device)
    return lambda s, b, h, q, k: s + values[0, h, q, k]


CASES = (  # the function, the head size, whether it is causal
    (alibi, 128, False), (alibi, 64, True), (alibi, 96, False), (alibi, 256, False),
    (buckets, 128, False), (buckets, 64, True), (buckets, 96, False),
    (bias, 128, False), (bias, 64, True),
)  # fmt: skip


def expected(q: Tensor, k: Tensor, v: Tensor, function: Callable[..., Any], causal: bool) -> Tensor:
    """In float64; the function sees all scores at once."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    head, row, column = (
        torch.arange(HEADS)[:, None, None],
        torch.arange(LENGTH)[:, None],
        torch.arange(LENGTH),
    )
    scores = function("cpu")(q @ k.mT / math.sqrt(q.shape[-1]), 0, head, row, column)
    if causal:
        scores = scores.masked_fill(column > row, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def main() -> int:
    """Runs all cases; the number of wrong ones."""
    wrong = 0
    for function, d_head, causal in CASES:
        generator = torch.Generator().manual_seed(1)
        shape = (1, LENGTH, HEADS, d_head)
        x = [torch.randn(shape, generator=generator).bfloat16() for _ in range(3)]
        out = flash_attention.attention(*(t.cuda() for t in x), causal=causal, score_mod=function("cuda"))
        error = float((out.cpu().double() - expected(*x, function, causal)).abs().max())
        wrong += not error < TOLERANCE
        kernel = flash_attention.last_kernel()
        print(f"{function.__name__} {d_head} causal {causal}: {error:.1e}, {kernel and kernel.short_form()}")
    print(f"{len(CASES)} cases, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
