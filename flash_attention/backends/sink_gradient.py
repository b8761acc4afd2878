"""The gradient of the sinks, from what a backward pass knows of each row."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The share of the softmax that a head's sink took, times -D, summed over all rows: (n_heads,) float32.

    Args:
        sinks: (n_heads,), any number, infinities too.
        lse: (batch, n_heads, seq_len_q), or of packed queries (n_heads, total_q).
        delta: like lse, ``D = rowsum(dO * O) - dLSE``. Where the LSE is -inf, rows of no sequence for one,
            it may hold anything.
    """
    if lse.ndim == 2:
        lse, delta = lse[None], delta[None]
    sinks = sinks.float()[None, :, None]
    share = torch.exp(sinks - lse)
    share = share.masked_fill((sinks == lse) & (sinks != -math.inf), 1.0)  # also of a sink of inf
    share = share.masked_fill((sinks == -math.inf) | (lse == -math.inf), 0.0)
    return (-share * delta).masked_fill(share == 0, 0.0).sum((0, 2))
