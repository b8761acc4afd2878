"""What ``score_mod`` and ``mask_mod`` do to blocks of scores on the CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_attention.mods.evaluate import evaluate
from flash_attention.mods.gradients import Indices, ScoreDerivative
from flash_attention.mods.tracing import Traced
from flash_helpers.mods.intervals import Interval, intervals
from flash_helpers.mods.tiles import Tile, tile_of


@dataclass(frozen=True)
class BlockMods:
    """A mod for some batch items and heads.

    Attributes:
        traced: the mod.
        items: the batch items, as the functions count them; of packed sequences, the sequences.
        heads: the query heads.
        group: query heads that share a kv head.
        derivative: of the score function, for the backward pass; None: it is not wanted, or there is none.
    """

    traced: Traced
    items: range
    heads: range
    group: int
    derivative: ScoreDerivative | None = None

    def differentiated(self, wanted: tuple[int, ...]) -> BlockMods:
        """The same for the backward pass, with gradients of some captured tensors."""
        return replace(self, derivative=ScoreDerivative.of(self.traced, wanted))

    def part(self, items: slice, heads: slice) -> BlockMods:
        """The same for some of them."""
        return replace(self, items=self.items[items], heads=self.heads[heads])

    def tile(self, queries: range, keys: range) -> Tile:
        """What the mask leaves of a block, as far as its bounds tell."""
        mod = self.traced.mod
        visible = mod.result("visible")
        if visible is None or not (queries and keys and self.items and self.heads):
            return Tile.FULL
        indices = {
            name: Interval.of(r[0], r[-1])
            for name, r in {"b": self.items, "h": self.heads, "q": queries, "k": keys}.items()
        }
        return tile_of(intervals(mod, indices, self.traced.numbers)[visible])

    def apply(self, scores: Tensor, queries: range, keys: range, tile: Tile) -> None:
        """Changes scores, then sets those that the mask hides to -inf.

        Args:
            scores: (items x kv heads, queries x group, keys), float32, contiguous.
            queries: of the block.
            keys: of the block.
            tile: what ``tile`` has said.
        """
        s = scores.view(len(self.items), -1, len(queries), self.group, len(keys))
        indices = self.indices(queries, keys)
        given = s.clone() if self.traced.mod.uses("score") else None
        if self.traced.mod.result("score") is not None:
            s.copy_(evaluate(self.traced, "score", given, *indices))
        if self.traced.mod.result("visible") is not None and tile is not Tile.FULL:
            seen = evaluate(self.traced, "visible", None, *indices)
            s.masked_fill_(~seen, -math.inf)

    def slopes(
        self, ds: Tensor, given: Tensor, queries: range, keys: range, sums: Mapping[int, Tensor]
    ) -> None:
        """Turns gradients of changed scores into those of scores as they were before.

        Args:
            ds: (items x kv heads, queries x group, keys), float32, contiguous; 0 where the key is hidden.
            given: the scores that the function was given, likewise.
            queries: of the block.
            keys: of the block.
            sums: by the places of captured tensors, float64: their gradients are added to it.
        """
        if self.derivative is None:
            return
        shape = (len(self.items), -1, len(queries), self.group, len(keys))
        ds, given, indices = ds.view(shape), given.view(shape), self.indices(queries, keys)
        hidden = ds == 0  # also where the derivative is infinite
        if sums:
            self.derivative.add(sums, ds, given, indices)
        ds.mul_(self.derivative.by_score(given, indices)).masked_fill_(hidden, 0.0)

    def indices(self, queries: range, keys: range) -> Indices:
        """b, h, q and k of a block, of shapes that broadcast to (items, kv heads, queries, group, keys)."""

        def along(r: range, *shape: int) -> Tensor:
            return torch.arange(r.start, r.stop, device="cpu").view(shape)

        any_size: Any = -1
        return (
            along(self.items, any_size, 1, 1, 1, 1),
            along(self.heads, any_size, 1, self.group, 1),
            along(queries, any_size, 1, 1),
            along(keys, any_size),
        )
