"""Which weights dropout keeps of a block on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_attention.call import Dropout
from flash_attention.mods.philox import random_words
from flash_helpers.mods.philox import threshold


@dataclass(frozen=True)
class BlockDropout:
    """Dropout of some batch items and heads.

    Attributes:
        dropout: probability and seed.
        items: the batch items; of packed sequences, the sequences.
        heads: the query heads.
        group: query heads that share a kv head.
    """

    dropout: Dropout
    items: range
    heads: range
    group: int

    @property
    def factor(self) -> float:
        """Of what is kept."""
        return 1.0 / (1.0 - self.dropout.p)

    def part(self, items: slice, heads: slice) -> BlockDropout:
        """The same for some of them."""
        return replace(self, items=self.items[items], heads=self.heads[heads])

    def apply(self, weights: Tensor, queries: range, keys: range) -> None:
        """Sets what is dropped to 0.

        Args:
            weights: (items x kv heads, queries x group, keys), contiguous.
            queries: of the block.
            keys: of the block.
        """
        b, h = (torch.arange(r.start, r.stop, device="cpu") for r in (self.items, self.heads))
        words = random_words(
            self.dropout.seed, b[:, None, None, None], h[:, None, None], queries, keys
        )  # (items, heads, queries, keys)
        dropped = words < threshold(self.dropout.p)
        dropped = dropped.unflatten(1, (-1, self.group)).transpose(2, 3)
        weights.view(dropped.shape).masked_fill_(dropped, 0.0)
