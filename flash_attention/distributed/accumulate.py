"""The running output of the queries of a rank, from tiles that come one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attention.distributed import pairs
from flash_attention.distributed.pairs import Arithmetic
from flash_attention.distributed.places import Place, heads_of, rows_of
from flash_attention.distributed.tiles import Coverage, Tile
from flash_attention.merge import merge_into, merge_sinks_into


class Output:
    """Output and LSE of queries, from tiles that come one after the other.

    Where each query is in one tile, the tile's kernel writes what is final. Else results of tiles are
    float32, merged in the order in which they come, and rounded once.

    Args:
        q: (batch, rows, heads, d).
        d_head_v: columns of the output.
        coverage: of all the tiles that will come.
        sinks: (heads,), counted once; None: there are none.
    """

    def __init__(self, q: Tensor, d_head_v: int, coverage: Coverage, sinks: Tensor | None) -> None:
        batch, rows, heads, _ = q.shape
        self._q, self._sinks, self._once = q, sinks, coverage.once
        dtype = q.dtype if coverage.once else torch.float32
        self.out = torch.empty(batch, rows, heads, d_head_v, dtype=dtype, device=q.device)
        self.lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
        self._left = [Place((0, rows), (0, heads))]  # what no tile has computed

    def add(self, tile: Tile, k: Tensor, v: Tensor, arithmetic: Arithmetic) -> None:
        """Computes a tile, whose keys are k and v."""
        rows, heads = rows_of(tile.q), heads_of(tile.heads)
        q, out = self._q[:, rows, heads], self.out[:, rows, heads]
        lse = self.lse[:, heads, rows]
        fresh = self._take(tile)
        if self._once:
            sinks = None if self._sinks is None else self._sinks[heads]
            lse.copy_(pairs.attend(q, k, v, tile, arithmetic, out, sinks)[1])
        elif fresh:
            lse.copy_(pairs.attend(q, k, v, tile, arithmetic, out)[1])
        else:
            merge_into(out, lse, *pairs.attend(q, k, v, tile, arithmetic))

    def _take(self, tile: Tile) -> bool:
        """Whether no tile has computed any of these queries; else those that none has become empty."""
        if not tile.q:
            return True
        heads = tile.heads or (0, self.out.shape[2])
        place = Place((tile.q[0], tile.q[-1] + 1), heads)
        mine = [common for left in self._left if (common := left.common(place))]
        self._left = [part for left in self._left for part in left.without(place)]
        if (tile.q.step == 1 or len(tile.q) == 1) and sum(part.size for part in mine) == place.size:
            return True
        self._fill(mine)
        return False

    def _fill(self, places: Sequence[Place]) -> None:
        """Queries that see nothing yet; where no tile is merged, they have seen the sinks."""
        for place in places:
            rows, heads = slice(*place.rows), slice(*place.heads)
            self.out[:, rows, heads] = 0.0
            if self._once and self._sinks is not None:
                self.lse[:, heads, rows] = self._sinks.float()[None, heads, None]
            else:
                self.lse[:, heads, rows] = -math.inf

    def finish(self) -> tuple[Tensor, Tensor]:
        """The output in the type of q, and the LSE."""
        self._fill(self._left)
        if not self._once and self._sinks is not None:
            merge_sinks_into(self.out, self.lse, self._sinks)
        return self.out.to(self._q.dtype), self.lse
