"""The result of queries that have no key at all."""

from __future__ import annotations

import math

import torch
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


def fill_packed_without_keys(
    out: Tensor, lse: Tensor | None, sinks: Tensor | None, cu_seqlens_q: Tensor, seqused_q: Tensor | None
) -> None:
    """The same of packed queries. Rows of no sequence, and those that do not count, have LSE -inf.

    Args:
        lse: (n_heads, total_q); None: not wanted.
    """
    out.zero_()
    if lse is None:
        return
    lse.fill_(-math.inf)
    if sinks is None or not lse.numel():
        return
    ends = cu_seqlens_q[1:].contiguous()
    rows = torch.arange(lse.shape[1], device=lse.device, dtype=torch.int32)
    sequence = torch.searchsorted(ends, rows, right=True)
    begins = cu_seqlens_q[sequence.clamp(max=len(ends) - 1)]
    counts = (sequence < len(ends)) & (rows >= cu_seqlens_q[0])
    if seqused_q is not None:
        counts &= rows - begins < seqused_q[sequence.clamp(max=len(ends) - 1)]
    lse.copy_(torch.where(counts, sinks.float()[:, None], -math.inf))
