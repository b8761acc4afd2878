"""The running output of the queries of a rank, from tiles that come one after the other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_attention.distributed import pairs
from flash_attention.distributed.pairs import Arithmetic
from flash_attention.distributed.tiles import Coverage, Tile
from flash_attention.merge import merge_into, merge_sinks_into


def rows_of(rows: range) -> slice:
    """A range of rows as an index, which makes a view."""
    return slice(rows.start, rows.stop, rows.step)


def heads_of(heads: tuple[int, int] | None) -> slice:
    """Likewise (first, last) of the heads; None: all."""
    return slice(None) if heads is None else slice(*heads)


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
        self._seen: list[tuple[range, range]] = []
        if not coverage.once or not coverage.everything:
            self.out.zero_()
            self.lse.fill_(-math.inf)
            if coverage.once and sinks is not None:  # of queries that are in no tile
                self.lse.copy_(sinks.float()[None, :, None])

    def add(self, tile: Tile, k: Tensor, v: Tensor, arithmetic: Arithmetic) -> None:
        """Computes a tile, whose keys are k and v."""
        rows, heads = rows_of(tile.q), heads_of(tile.heads)
        q, out = self._q[:, rows, heads], self.out[:, rows, heads]
        lse = self.lse[:, heads, rows]
        if self._once:
            sinks = None if self._sinks is None else self._sinks[heads]
            lse.copy_(pairs.attend(q, k, v, tile, arithmetic, out, sinks)[1])
            return
        part, part_lse = pairs.attend(q, k, v, tile, arithmetic)
        place = range(*heads.indices(self.out.shape[2]))
        if any(_overlap(tile.q, others) and _overlap(place, of_heads) for others, of_heads in self._seen):
            merge_into(out, lse, part, part_lse)
        else:
            out.copy_(part)
            lse.copy_(part_lse)
        self._seen.append((tile.q, place))

    def finish(self) -> tuple[Tensor, Tensor]:
        """The output in the type of q, and the LSE."""
        if not self._once and self._sinks is not None:
            merge_sinks_into(self.out, self.lse, self._sinks)
        return self.out.to(self._q.dtype), self.lse


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop
