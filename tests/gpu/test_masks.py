"""Mask tensors, lists of blocks and random masks on a GPU, against what the CPU computes of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attention
from flash_attention import sdpa
from flash_attention.errors import NoKernelError
from flash_attention.flex_attention import flex_attention
from flash_attention.mods import random

sys.path.insert(0, str(Path(__file__).parents[1] / "compat"))
from asked_problems import build_all

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

BATCH, HEADS, SEQ_Q, SEQ_K, D = 2, 4, 300, 420, 64
Call = Callable[[str], Any]


def tensors(device: str, seq_q: int = SEQ_Q) -> list[Tensor]:
    """query, key and value, (batch, heads, seq, d)."""
    generator = torch.Generator("cpu").manual_seed(5)
    shapes = [(BATCH, HEADS, seq_q, D), *[(BATCH, 2, SEQ_K, D)] * 2]
    return [torch.randn(shape, generator=generator, device="cpu").half().to(device) for shape in shapes]


def by_tensor(shape: tuple[int, ...], kind: str, device: str) -> Any:
    values = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(6), device="cpu")
    mask = {
        "bool": lambda: values > 0,
        "added": lambda: values.bfloat16(),
        "hiding": lambda: torch.zeros(shape).masked_fill(values < 0, -torch.inf),
        "lowest": lambda: torch.zeros(shape).masked_fill(values < 0, torch.finfo(torch.float32).min),
    }[kind]()
    return sdpa(*tensors(device), attn_mask=mask.to(device), enable_gqa=True)


def by_blocks(device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    document = (torch.arange(SEQ_K, device="cpu") // 90).to(device)
    mask_mod = lambda b, h, q, k: (document[q] == document[k]) & (q >= k)  # noqa: E731
    block_mask = create_block_mask(mask_mod, None, None, SEQ_K, SEQ_K, device=device)
    return flex_attention(*tensors(device, SEQ_K), block_mask=block_mask, enable_gqa=True, return_lse=True)


def by_lists(device: str) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    counts = torch.tensor([[[1, 2, 3, 4]]], dtype=torch.int32, device=device)
    places = torch.arange(4, dtype=torch.int32, device=device).expand(1, 1, 4, 4).contiguous()
    block_mask = BlockMask.from_kv_blocks(counts, places, BLOCK_SIZE=128, seq_lengths=(SEQ_K, SEQ_K))
    return flex_attention(*tensors(device, SEQ_K), block_mask=block_mask, enable_gqa=True, return_lse=True)


def by_chance(device: str) -> Any:
    q, k, v = (x.transpose(1, 2) for x in tensors(device))
    return flash_attention.attention(
        q, k, v, return_lse=True, mask_mod=lambda b, h, q, k: random(11, b, h, q, k) < 0.7
    )


SHAPES = {
    "all": (BATCH, HEADS, SEQ_Q, SEQ_K), "pairs": (SEQ_Q, SEQ_K), "heads": (HEADS, 1, 1),
    "keys": (BATCH, 1, 1, SEQ_K), "queries": (BATCH, 1, SEQ_Q, 1), "one": (1, 1),
}  # fmt: skip
CALLS: dict[str, Call] = {
    f"{kind} {name}": partial(by_tensor, shape, kind)
    for kind, names in {"bool": SHAPES, "added": SHAPES, "hiding": ["keys"], "lowest": ["pairs"]}.items()
    for name, shape in ((name, SHAPES[name]) for name in names)
} | {"documents in blocks": by_blocks, "lists of blocks": by_lists, "by chance": by_chance}


@pytest.fixture(scope="module")
def trouble() -> str:
    """All kernels are compiled at the same time; what could not be."""
    return build_all((partial(call, "cuda") for call in CALLS.values()), "cuda")


@pytest.mark.parametrize("name", CALLS)
def test_the_gpu_computes_what_the_cpu_computes(name: str, trouble: str) -> None:
    found, right = CALLS[name]("cuda"), CALLS[name]("cpu")
    for x, y in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, right)), strict=True):
        torch.testing.assert_close(
            x.cpu().float(), y.float(), rtol=4e-3, atol=4e-3, msg=lambda m: m + trouble
        )


def test_dropout_is_refused_by_name() -> None:
    q, k, v = (x.transpose(1, 2) for x in tensors("cuda"))
    with pytest.raises(NoKernelError, match="dropout_p"):
        flash_attention.attention(q, k, v, dropout_p=0.1)


def test_a_seed_comes_from_the_generator_of_the_gpu() -> None:
    from flash_attention.run.eager import drawn_seed

    torch.manual_seed(3)
    first, second = (int(drawn_seed(torch.device("cuda"))) for _ in range(2))
    torch.manual_seed(3)
    assert int(drawn_seed(torch.device("cuda"))) == first != second
