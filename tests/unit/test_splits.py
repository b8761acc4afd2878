"""How many parts keys are cut into: filled GPUs, bounds, and what must not split."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_helpers.select.splits import MAX_SPLITS, WORKSPACE_BYTES, n_splits, workspace_bytes

INCLUDE = Path(__file__).parents[2] / "src" / "include"
H100 = {"sm_count": 132, "blocks_per_sm": 2}


def test_the_combining_kernel_takes_as_many() -> None:
    text = (INCLUDE / "common" / "split_combine.cuh").read_text()
    assert re.findall(r"kMaxSplits = (\d+);", text) == [str(MAX_SPLITS)]


@pytest.mark.parametrize(
    ("kv_heads", "keys"), [(8, 16384), (32, 16384), (2, 131072), (8, 131072), (40, 32768)]
)
def test_one_query_against_a_long_cache_fills_the_gpu(kv_heads: int, keys: int) -> None:
    parts = n_splits(kv_heads, 4 * kv_heads, keys // 64, 128, **H100)
    blocks = kv_heads * parts
    waves = -(-blocks // 264)
    assert blocks / (264 * waves) > 0.9


def test_a_gpu_that_is_full_is_left_alone() -> None:
    assert n_splits(264, 264 * 64, 256, 128, **H100) == 1
    assert n_splits(100_000, 100_000 * 64, 32, 128, **H100) == 1


def test_few_keys_are_not_split() -> None:
    assert n_splits(8, 32, 1, 128, **H100) == 1
    assert n_splits(8, 32, 4, 128, **H100) == 1


def test_a_last_wave_that_is_nearly_empty_is_filled() -> None:
    parts = n_splits(270, 270, 256, 128, **H100)  # 264 blocks run at once
    assert parts > 1
    assert -(-270 * parts // 264) * -(-256 // parts) < 1.2 * 256 * 270 / 264


def test_nothing_to_do() -> None:
    assert n_splits(0, 0, 16, 128, **H100) == 1
    assert n_splits(8, 8, 0, 128, **H100) == 1


def test_a_workspace_that_is_too_large_for_two_parts() -> None:
    rows = WORKSPACE_BYTES // workspace_bytes(1, 1, 128)
    assert n_splits(1, rows + 1, 10_000, 128, **H100) == 1


@given(
    st.integers(1, 1000), st.integers(1, 200_000), st.integers(1, 4096), st.sampled_from([64, 128, 256]),
    st.sampled_from([46, 108, 132]), st.integers(1, 4),
)  # fmt: skip
def test_bounds(row_blocks: int, rows: int, tiles: int, d: int, sm_count: int, per_sm: int) -> None:
    parts = n_splits(row_blocks, rows, tiles, d, sm_count=sm_count, blocks_per_sm=per_sm)
    assert 1 <= parts <= min(MAX_SPLITS, tiles)
    assert parts == 1 or workspace_bytes(parts, rows, d) <= WORKSPACE_BYTES
