"""The running results of the tiles of a rank: the output of its queries, and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


class Sums:
    """float32 sums of gradients of the same rows, in the order in which the shares come.

    Attributes:
        tensors: (batch, rows, heads, d) each; what they hold counts once a share has come.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        self._begun = False

    @classmethod
    def like(cls, tensors: Sequence[Tensor]) -> Sums:
        """Of tensors of these shapes."""
        return cls([torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in tensors])

    def add(self, shares: Sequence[Tensor], rows: range, heads: slice = slice(None)) -> None:
        """Adds shares of some rows and heads."""
        whole = len(rows) == self.tensors[0].shape[1] and rows.step == 1
        whole = whole and heads.indices(self.tensors[0].shape[2]) == (0, self.tensors[0].shape[2], 1)
        if not self._begun and not whole:
            self._clear()
        for x, share in zip(self.tensors, shares, strict=True):
            place = x[:, rows_of(rows), heads]
            place.add_(share) if self._begun else place.copy_(share)
        self._begun = True

    def _clear(self) -> None:
        for x in self.tensors:
            x.zero_()
        self._begun = True

    def finish(self) -> tuple[Tensor, ...]:
        """The sums."""
        if not self._begun:
            self._clear()
        return self.tensors
