"""What ``score_mod`` and ``mask_mod`` do to blocks of scores on the CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attention.mods.evaluate import evaluate
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
    """

    traced: Traced
    items: range
    heads: range
    group: int

    def part(self, items: slice, heads: slice) -> BlockMods:
        """The same for some of them."""
        return BlockMods(self.traced, self.items[items], self.heads[heads], self.group)

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

    def indices(self, queries: range, keys: range) -> tuple[Tensor, ...]:
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
