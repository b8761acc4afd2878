"""Bounds of a mod's values are never too narrow, and those of affine masks are exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from random_functions import function, tables

from flash_attention.mods import and_masks, or_masks
from flash_attention.mods.evaluate import _Evaluation
from flash_attention.mods.tracing import trace
from flash_helpers.mods.intervals import Interval, intervals
from flash_helpers.mods.operations import Kind
from flash_helpers.mods.stages import loops
from flash_helpers.mods.tiles import Tile, Tiling, tiles

CAPTURED = tables(torch.Generator().manual_seed(0))


def values(traced, q, k):
    """Every node's value over a range of queries and keys."""
    leaves = {"b": torch.tensor(1), "h": torch.tensor(2), "score": torch.tensor(0.0)}
    leaves |= {"q": torch.arange(*q)[:, None], "k": torch.arange(*k)}
    evaluation = _Evaluation(traced, torch.float64, leaves, torch.device("cpu"))
    last = len(traced.mod.nodes) - 1
    evaluation.value(last, [not inside for inside in loops(traced.mod)], None)
    return evaluation.values


@pytest.mark.parametrize(
    "ranges", [((0, 11), (0, 11)), ((3, 5), (7, 11)), ((8, 9), (2, 3)), ((0, 4), (5, 6))]
)
def test_bounds_hold_for_random_masks(ranges) -> None:
    q, k = ranges
    seen = 0
    for seed in range(150):
        traced = trace(None, function(seed, "mask", CAPTURED, depth=5).function)
        indices = {
            "q": Interval.of(q[0], q[1] - 1), "k": Interval.of(k[0], k[1] - 1), "b": Interval.of(1, 1),
            "h": Interval.of(2, 2),
        }  # fmt: skip
        known = intervals(traced.mod, indices, traced.numbers)
        any_number = intervals(traced.mod, indices)
        found = values(traced, q, k)
        for place, node in enumerate(traced.mod.nodes):
            if node.kind is Kind.FLOAT:
                continue
            for bounds in (known[place], any_number[place]):
                low, high = int(bounds.low), int(bounds.high)
                assert low <= -(2**61) or int(found[place].min()) >= low, (seed, node)
                assert high >= 2**61 or int(found[place].max()) <= high, (seed, node)
            seen += int(known[place].high) - int(known[place].low) < 100
    assert seen > 1000  # most bounds say something


def grid_of(mask, tiling):
    """What each tile of a mask holds, by looking at each element."""
    q, k = torch.arange(tiling.seq_len_q)[:, None], torch.arange(tiling.seq_len_k)
    seen = torch.broadcast_to(
        mask(torch.tensor(0), torch.tensor(0), q, k), (tiling.seq_len_q, tiling.seq_len_k)
    )
    rows = []
    for i in range(0, tiling.seq_len_q, tiling.B_r):
        parts = [seen[i : i + tiling.B_r, j : j + tiling.B_c] for j in range(0, tiling.seq_len_k, tiling.B_c)]
        rows.append([Tile.FULL if p.all() else Tile.PARTIAL if p.any() else Tile.EMPTY for p in parts])
    return np.array(rows, np.int8)


def causal(b, h, q, k):
    return q >= k


def window(left, right):
    return lambda b, h, q, k: (q - k <= left) & (k - q <= right)


AFFINE = {
    "causal": causal,
    "window": window(20, 5),
    "causal window": and_masks(causal, window(33, 100)),
    "prefix": or_masks(lambda b, h, q, k: k < 40, causal),
    "shifted": lambda b, h, q, k: 2 * q + 7 >= 3 * k,
    "distance": lambda b, h, q, k: (q - k).abs() <= 12,
    "blocks": lambda b, h, q, k: q // 32 == k // 32,
    "blocks of tiles, causal": lambda b, h, q, k: (q // 32 == k // 32) | (q // 32 > k // 32),
    "nothing": lambda b, h, q, k: q < 0,
    "everything": lambda b, h, q, k: k >= 0,
}


@pytest.mark.parametrize("name", AFFINE)
@pytest.mark.parametrize(
    "tiling", [Tiling(128, 128, 16, 32), Tiling(100, 77, 16, 16), Tiling(1, 300, 64, 64)]
)
def test_tiles_of_affine_masks_are_exact(name, tiling) -> None:
    traced = trace(None, AFFINE[name])
    np.testing.assert_array_equal(tiles(traced.mod, tiling, traced.numbers), grid_of(AFFINE[name], tiling))


def test_tiles_of_other_masks_are_never_wrong() -> None:
    tiling, told = Tiling(11, 11, 3, 2), 0
    for seed in range(300):
        mask = function(seed, "mask", CAPTURED, depth=3).function
        traced = trace(None, mask)
        found, truth = tiles(traced.mod, tiling, traced.numbers, 0, 0), grid_of(mask, tiling)
        assert ((found == truth) | (found == Tile.PARTIAL)).all(), seed
        told += int((found != Tile.PARTIAL).sum())
    assert told > 500


def test_the_complement_of_a_whole_number_is_no_truth() -> None:
    """Also where the number is known to be 0 or 1."""
    traced = trace(None, lambda b, h, q, k: ~(q % 2) < 0)
    assert (tiles(traced.mod, Tiling(8, 8, 4, 4), ()) == Tile.FULL).all()
    complement = next(i for i, node in enumerate(traced.mod.nodes) if node.op == "not")
    assert [int(x) for x in intervals(traced.mod)[complement]] == [-2, -1]
    of_a_truth = trace(None, lambda b, h, q, k: ~(q > k))
    assert [int(x) for x in intervals(of_a_truth.mod)[-1]] == [0, 1]


def test_a_mask_of_one_head_differs_from_that_of_all() -> None:
    traced = trace(None, lambda b, h, q, k: (h == 0) | (q >= k))
    tiling = Tiling(4, 4, 2, 2)
    assert tiles(traced.mod, tiling, (), head=0).tolist() == [[2, 2], [2, 2]]
    assert tiles(traced.mod, tiling, (), head=1).tolist() == [[1, 0], [2, 1]]
    assert tiles(traced.mod, tiling, ()).tolist() == [[1, 1], [2, 1]]
    with pytest.raises(ValueError, match="no mask"):
        tiles(trace(lambda s, b, h, q, k: s).mod, tiling, ())
