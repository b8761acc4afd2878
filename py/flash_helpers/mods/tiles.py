"""Which tiles of queries and keys a mask leaves empty or full, found without looking at one element."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flash_helpers.mods.intervals import INDEX_RANGE, Interval, intervals
from flash_helpers.mods.mod import Mod


class Tile(IntEnum):
    """What a tile holds, as far as is known. ``PARTIAL`` is always right."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


class Tiling(NamedTuple):
    """Sizes of a grid of tiles.

    Attributes:
        seq_len_q: queries.
        seq_len_k: keys.
        B_r: queries of a tile; the last one may have fewer.
        B_c: keys of a tile.
    """

    seq_len_q: int
    seq_len_k: int
    B_r: int
    B_c: int

    def ranges(self) -> tuple[Interval, Interval]:
        """First and last query of each row of tiles, (rows, 1), and keys of each column, (columns)."""
        first_q = np.arange(0, self.seq_len_q, self.B_r, dtype=np.int64)[:, None]
        first_k = np.arange(0, self.seq_len_k, self.B_c, dtype=np.int64)
        last_q = np.minimum(first_q + self.B_r, self.seq_len_q) - 1
        return Interval(first_q, last_q), Interval(
            first_k, np.minimum(first_k + self.B_c, self.seq_len_k) - 1
        )


def tile_of(bounds: Interval) -> Tile:
    """The tile over which a mask has these bounds."""
    if int(bounds.low) == 1:
        return Tile.FULL
    return Tile.EMPTY if int(bounds.high) == 0 else Tile.PARTIAL


def tiles(
    mod: Mod,
    tiling: Tiling,
    numbers: Sequence[int | float],
    batch: int | None = None,
    head: int | None = None,
) -> NDArray[np.int8]:
    """The ``Tile`` of each tile, (rows, columns): of affine masks exactly, of others where the bounds tell
    it.

    Args:
        mod: a mod with a result ``visible``.
        tiling: the tiles.
        numbers: the captured numbers.
        batch: a batch item; None: what holds for all of them.
        head: a query head; None: for all.
    """
    visible = mod.result("visible")
    if visible is None:
        raise ValueError("the mod has no mask; tiles tells the tiles of one")
    q, k = tiling.ranges()
    indices = {"q": q, "k": k}
    for name, one in (("b", batch), ("h", head)):
        indices[name] = Interval.of(*INDEX_RANGE) if one is None else Interval.of(one, one)
    bounds = intervals(mod, indices, numbers)[visible]
    found = np.full((q.low.shape[0], k.low.shape[0]), Tile.PARTIAL, np.int8)
    found[np.broadcast_to(bounds.low == 1, found.shape)] = Tile.FULL
    found[np.broadcast_to(bounds.high == 0, found.shape)] = Tile.EMPTY
    return found
