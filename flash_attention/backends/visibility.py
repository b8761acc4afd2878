"""Which keys a query sees, by the place of both: causal masks and sliding windows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_FAR = 1 << 62


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees: key j when ``i + offset - left <= j <= i + offset + right``.

    Attributes:
        left, right: limits of either sign; None: none. Causal is a right one of 0.
        offset: seq_len_k - seq_len_q, which aligns the last query with the last key.
    """

    left: int | None
    right: int | None
    offset: int

    @property
    def unlimited(self) -> bool:
        """Every query sees every key."""
        return self.left is None and self.right is None

    def keys_of(self, first: int, last: int) -> tuple[int, int]:
        """The range [begin, end) of keys that some query of [first, last) sees, not clipped to the tensor."""
        begin = 0 if self.left is None else first + self.offset - self.left
        end = _FAR if self.right is None else last + self.offset + self.right
        return begin, end

    def queries_of(self, first: int, last: int) -> tuple[int, int]:
        """The range [begin, end) of queries that see some key of [first, last), not clipped."""
        begin = 0 if self.right is None else first - self.offset - self.right
        end = _FAR if self.left is None else last - self.offset + self.left
        return begin, end

    def hide(self, scores: Tensor, first_query: int, first_key: int) -> None:
        """Sets scores (n, queries, group, keys) of hidden keys to -inf, touching only rows that have any."""
        queries, keys = scores.shape[1], scores.shape[3]
        own = torch.arange(queries, device="cpu")[:, None] + (first_query + self.offset)  # (queries, 1)
        key = torch.arange(first_key, first_key + keys, device="cpu")  # (keys,)
        if self.right is not None:
            end = min(queries, first_key + keys - 1 - self.offset - self.right - first_query)
            if end > 0:
                _hide(scores[:, :end], key > own[:end] + self.right)
        if self.left is not None:
            begin = max(0, first_key - self.offset + self.left + 1 - first_query)
            if begin < queries:
                _hide(scores[:, begin:], key < own[begin:] - self.left)


def _hide(scores: Tensor, hidden: Tensor) -> None:
    scores.masked_fill_(hidden[:, None, :], -math.inf)
