"""The rows of the grid of gradients: head sizes and masks, packed sequences, windows, grouped heads.

Each is there twice, as the backward pass alone and as both passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flash_helpers.benchmark.cases import Case
from flash_helpers.benchmark.grid_cases import dense, packed
from flash_helpers.benchmark.result_file import BOTH
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.problem import BACKWARD


def gradient_cases() -> Iterator[Case]:
    """Every row; what has features first."""
    for case in (*_packed(), *_windows(), *_grouped(), *_sizes(), *_plain()):
        for direction in (BACKWARD, BOTH):
            yield replace(case, direction=direction)


def _packed() -> Iterator[Case]:
    for d_head in (64, 128, 256):
        for causal in (False, True):
            yield packed("mixed", causal, d_head)
    for name in ("tiny", "one long"):
        yield packed(name, True, 128)


def _windows() -> Iterator[Case]:
    for d_head in (64, 128, 256):
        yield dense("window", 8192, True, window=1024, d_head=d_head)
    yield dense("window", 16384, True, window=1024)
    yield dense("window", 8192, True, window=128)
    yield dense("window", 8192, window=1024, window_right=1024)


def _grouped() -> Iterator[Case]:
    for d_head, batch in ((64, 4), (128, 2)):
        for causal in (False, True):
            yield dense("grouped heads", 4096, causal, d_head=d_head, batch=batch, heads=32, heads_kv=8)
    yield dense("grouped heads", 4096, True, d_head=256, batch=2, heads=16, heads_kv=4)


def _sizes() -> Iterator[Case]:
    yield dense("odd length", 4090, True)
    for d_head in (96, 192):
        yield dense("head size", 4096, True, d_head=d_head)
    yield dense("head size", 4096, True, d_head=192, d_head_v=128)
    yield dense("float16", 4096, True, dtype=DType.FP16)


def _plain() -> Iterator[Case]:
    for d_head in (64, 128, 256):
        for causal in (False, True):
            for seq in (512, 4096, 16384):
                yield dense("plain", seq, causal, d_head=d_head)
