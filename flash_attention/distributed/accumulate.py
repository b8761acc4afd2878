"""The running result of some queries: outputs of tiles are merged in the order in which they come."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_attention.distributed.tiles import Tile
from flash_attention.merge import merge_into, merge_sinks_into


def rows_of(rows: range) -> slice:
    """A range of rows as an index, which makes a view."""
    return slice(rows.start, rows.stop, rows.step)


class Accumulator:
    """Output and LSE of queries over the keys so far, float32.

    Attributes:
        out: (batch, rows, heads, d_v).
        lse: (batch, heads, rows).
    """

    def __init__(self, q: Tensor, d_head_v: int) -> None:
        batch, rows, heads, _ = q.shape
        self.out = torch.zeros(batch, rows, heads, d_head_v, dtype=torch.float32, device=q.device)
        self.lse = torch.full((batch, heads, rows), -math.inf, dtype=torch.float32, device=q.device)
        self._seen: list[tuple[range, range]] = []

    def add(self, tile: Tile, out: Tensor, lse: Tensor) -> None:
        """Merges the result of a tile."""
        heads = range(*tile.heads) if tile.heads else range(self.out.shape[2])
        own_out = self.out[:, rows_of(tile.q), rows_of(heads)]
        own_lse = self.lse[:, rows_of(heads), rows_of(tile.q)]
        if any(_overlap(tile.q, rows) and _overlap(heads, others) for rows, others in self._seen):
            merge_into(own_out, own_lse, out, lse)
        else:
            own_out.copy_(out)
            own_lse.copy_(lse)
        self._seen.append((tile.q, heads))

    def finish(self, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The output in ``dtype`` and the LSE, with the sinks, which are counted here and nowhere else."""
        if sinks is not None:
            merge_sinks_into(self.out, self.lse, sinks)
        return self.out.to(dtype), self.lse


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop
