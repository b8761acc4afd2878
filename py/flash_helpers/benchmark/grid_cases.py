"""The rows of the grid: one or a few sizes of every feature, of every head size, and of shapes that are hard.

Where no batch or number of heads is said there are 16384 tokens and 2048 columns. What was behind a peer when
the grid was made comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flash_helpers.benchmark.cases import Case
from flash_helpers.kernels.dtype import DType

TOKENS, HIDDEN = 16384, 2048
UNEVEN = (4096, 200, 1700, 64, 3000, 900, 2500, 33, 3891)
PACKED = {
    "equal": (2048,) * 8,
    "mixed": UNEVEN,
    "tiny": (64,) * 256,
    "one long": (*(128,) * 32, 12288),
}


def dense(feature: str, seq: int, causal: bool = False, **more: Any) -> Case:
    """A case of equal lengths, with ``TOKENS`` and ``HIDDEN``."""
    heads = more.pop("heads", HIDDEN // more.get("d_head", 128))
    batch = more.pop("batch", max(1, TOKENS // seq))
    return Case(
        feature, batch, seq, more.pop("seq_k", seq), heads, more.pop("heads_kv", heads), causal, **more
    )


def grid_cases() -> Iterator[Case]:
    """Every row."""
    for seq in (512, 1024, 2048):
        for causal in (False, True):
            yield dense("few blocks", seq, causal, batch=1, heads=8)
    for causal in (False, True):
        yield dense("few blocks", 1024, causal, batch=1, heads=8, d_head=64)
        yield dense("few blocks", 1024, causal, batch=1, heads=4, d_head=256)
    yield dense("few blocks", 1024, batch=1, heads=16, d_head=64)
    yield dense("soft cap", 8192, True, softcap=30.0)
    yield dense("soft cap", 2048, softcap=30.0)
    yield dense("soft cap", 8192, True, softcap=50.0, d_head=64)
    yield dense("soft cap", 2048, softcap=50.0, d_head=64)
    for causal in (True, False):
        yield dense("soft cap", 4096, causal, softcap=50.0, d_head=256)
    yield dense("soft cap", 8192, window=4096, softcap=50.0, d_head=256)
    for keys in (77, 1, 16, 256, 512):
        yield dense("few keys", 4096, batch=8, heads=16, d_head=64, seq_k=keys)
    for keys in (77, 16, 256):
        yield dense("few keys", 4096, batch=8, heads=8, seq_k=keys)
    yield from _packed()
    yield from _lengths()
    yield from _head_sizes()
    yield from _masks_and_heads()
    yield from _caches()


def _packed() -> Iterator[Case]:
    for d_head in (64, 128):
        for causal in (False, True):
            yield packed("mixed", causal, d_head)
    for name in ("equal", "tiny", "one long"):
        yield packed(name, True, 128)


def packed(name: str, causal: bool, d_head: int) -> Case:
    """A case of packed sequences: one of ``PACKED``."""
    lengths, heads = PACKED[name], HIDDEN // d_head
    n = max(lengths)
    return Case(f"packed, {name}", len(lengths), n, n, heads, heads, causal, lengths=lengths, d_head=d_head)


def _lengths() -> Iterator[Case]:
    for seq, causal in ((4090, True), (4097, True), (1000, False), (777, True)):
        yield dense("odd length", seq, causal)
    for seq, batch in ((32, 512), (64, 256), (128, 128), (256, 64)):
        yield dense("short sequences", seq, True, batch=batch)
    for seq, causal in ((128, False), (128, True), (64, False), (300, False)):
        yield dense("short sequences", seq, causal, d_head=64)


def _head_sizes() -> Iterator[Case]:
    for causal in (False, True):
        for d_head in (64, 80, 96, 128, 192, 256):
            yield dense("head size", 4096, causal, d_head=d_head)
        yield dense("head size", 4096, causal, d_head=192, d_head_v=128)
        yield dense("head size", 8192, causal, d_head=192)
        for d_head in (64, 128):
            yield dense("float16", 4096, causal, d_head=d_head, dtype=DType.FP16)


def _masks_and_heads() -> Iterator[Case]:
    for window in (128, 1024, 4096):
        yield dense("window", 8192, True, window=window)
    yield dense("window", 8192, window=1024, window_right=1024)
    yield dense("window", 8192, True, window=1024, d_head=64)
    for heads_kv in (8, 4, 2):
        yield dense("grouped heads", 4096, True, heads=32, heads_kv=heads_kv)
    yield dense("sinks", 4096, True, sinks=True)
    yield dense("sinks", 8192, True, window=128, sinks=True, heads=64, heads_kv=8, d_head=64, batch=1)


def _caches() -> Iterator[Case]:
    for queries, batch in ((128, 1), (512, 1), (2048, 1), (128, 4)):
        more = {"batch": batch, "heads": 32, "heads_kv": 8, "seq_k": 32768}
        yield dense("chunk of queries", queries, True, **more)
    for batch, keys in ((1, 16384), (8, 8192), (32, 2048), (64, 4096)):
        yield Case("decode", batch, 1, keys, 32, 8)
