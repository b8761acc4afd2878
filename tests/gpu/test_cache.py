"""The cache call in a CUDA graph whose lengths and pages change between replays."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from flash_attention import last_kernel
from flash_attention.compat.flash_attn import flash_attn_with_kvcache
from flash_helpers.test.utils import reference

pytestmark = pytest.mark.gpu

BATCH, CAPACITY, HEADS, HEADS_KV, D = 3, 4096, 16, 4, 128
STEPS = ((4000, 1, 77), (4001, 2, 78), (0, 4095, 1000))


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)


@pytest.mark.parametrize("page_size", [0, 16, 256, 1024])
def test_lengths_and_pages_change_between_replays(page_size: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    k_whole, v_whole = (normal(generator, BATCH, CAPACITY, HEADS_KV, D) for _ in range(2))
    q, k, v = (normal(generator, BATCH, 1, heads, D) for heads in (HEADS, HEADS_KV, HEADS_KV))
    seqlens = torch.ones(BATCH, dtype=torch.int32, device="cuda")
    k_cache, v_cache, table = k_whole.clone(), v_whole.clone(), None
    if page_size:
        n_pages = BATCH * CAPACITY // page_size
        k_cache, v_cache = (x.view(n_pages, page_size, HEADS_KV, D).clone() for x in (k_whole, v_whole))
        table = torch.arange(n_pages, dtype=torch.int32, device="cuda").view(BATCH, -1)

    def call() -> Tensor:
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=seqlens, block_table=table, causal=True
        )

    call()  # compiles
    assert last_kernel().traits.paged == bool(page_size)
    assert last_kernel().traits.split
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for step, lengths in enumerate(STEPS):
        seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        for new in (q, k, v):
            new.normal_(generator=generator)
        if table is None:  # the keys appended before are gone
            k_cache.copy_(k_whole)
            v_cache.copy_(v_whole)
        else:  # the same keys lie in other pages at each step
            order = torch.randperm(table.numel(), generator=torch.Generator().manual_seed(step)).cuda()
            table.copy_(order.view(table.shape))
            for cache, whole in ((k_cache, k_whole), (v_cache, v_whole)):
                cache[order] = whole.view(cache.shape)
        graph.replay()
        first = out.clone()
        graph.replay()  # appends the same rows in the same places
        assert torch.equal(first, out)
        for b, n in enumerate(lengths):
            keys, values = (
                torch.cat((whole[b, :n], new[b]))[None] for whole, new in ((k_whole, k), (v_whole, v))
            )
            expected, _ = reference(q[b : b + 1], keys, values)
            torch.testing.assert_close(out[b : b + 1].double(), expected, atol=1.6e-2, rtol=1.6e-2)


APPENDING = """
import torch
from flash_attention.compat.flash_attn import flash_attn_with_kvcache

def row(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")

x = torch.zeros(1, 1, 1, 64, dtype=torch.float16, device="cuda")
cache = torch.zeros(2, 16, 1, 64, dtype=torch.float16, device="cuda")
place = {place}
flash_attn_with_kvcache(x, cache, cache.clone(), x, x, **{{"cache_seqlens": row(4)}} | place)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(
    "place",
    [
        '{"block_table": row(-1)[:, None]}',
        '{"cache_batch_idx": row(-1)}',
        '{"cache_batch_idx": row(-1).long()}',
        '{"cache_seqlens": row(-1)}',
        '{"cache_seqlens": row(16)}',
    ],
)
def test_a_place_that_is_not_there_is_an_error_of_the_device(place: str) -> None:
    """In a process of its own, which an assertion on the device leaves without one."""
    command = [sys.executable, "-c", APPENDING.format(place=place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "device-side assert" in done.stderr


def test_a_place_that_is_there_is_none() -> None:
    command = [sys.executable, "-c", APPENDING.format(place='{"block_table": row(1)[:, None]}')]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
