"""The result of queries that have no key at all."""

from __future__ import annotations

import math

from torch import Tensor


def fill_without_keys(out: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
    """Writes zeros, and the log-sum-exp of no key: -inf, or the sink of the head.

    Args:
        lse: (batch, n_heads, seq_len_q), without sinks also (n_heads, total_q); None: not wanted.
    """
    out.zero_()
    if lse is None:
        return
    if sinks is None:
        lse.fill_(-math.inf)
    else:
        lse.copy_(sinks[None, :, None])
