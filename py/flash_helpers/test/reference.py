"""The independent reference: attention in float64, each query over the keys it sees and no others.

It shares no code with the backends. There is no mask here: hidden keys are never read, so that a wrong
mask cannot be wrong twice in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_SCORES = 1 << 24  # scores held at a time: 128 MiB in float64


def visible_keys(
    query: int,
    seq_len_q: int,
    seq_len_k: int,
    causal: bool,
    window: tuple[int | None, int | None],
    diagonal_offset: int = 0,
) -> range:
    """The keys that a query sees. Without an offset the last query stands at the last key."""
    place = seq_len_k - (seq_len_q - query) + diagonal_offset  # the query's own place among the keys
    left, right = window
    first, last = 0, seq_len_k - 1
    if left is not None:
        first = max(first, place - left)
    if right is not None:
        last = min(last, place + right)
    if causal:
        last = min(last, place)
    return range(first, max(first, last + 1))


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    diagonal_offset: int = 0,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp in float64.

    Args:
        q: (batch, seq_len_q, n_heads, d_head).
        k: (batch, seq_len_k, n_heads_kv, d_head); query head h reads kv head h // (n_heads / n_heads_kv).
        v: (batch, seq_len_k, n_heads_kv, d_head_v).
        causal: key j is visible to query i when j <= p with p = i + seq_len_k - seq_len_q + diagonal_offset.
        softmax_scale: factor of the scores; None: d_head ** -0.5.
        window: (left, right), of either sign: p - left <= j <= p + right; None: no limit.
        softcap: scores become softcap * tanh(score / softcap); 0: they stay.
        sinks: (n_heads,) logits that take part in the softmax and have no value.
        diagonal_offset: see causal.
        score_mod: called as it is, with whole blocks of scores and indices that broadcast with them.
        mask_mod: likewise.

    Returns:
        out (batch, seq_len_q, n_heads, d_head_v) and lse (batch, n_heads, seq_len_q). A query without
        keys, or with scores of -inf alone, has out 0 and, without a sink, lse -inf. One with a score of +inf
        is NaN.
    """
    batch, seq_len_q, n_heads, d_head = q.shape
    seq_len_k, n_heads_kv, d_head_v = k.shape[1], k.shape[2], v.shape[3]
    scale = d_head**-0.5 if softmax_scale is None else softmax_scale
    out = q.new_zeros(batch, seq_len_q, n_heads, d_head_v, dtype=torch.float64)
    lse = q.new_full((batch, n_heads, seq_len_q), -math.inf, dtype=torch.float64)
    if not n_heads or not batch:
        return out, lse
    kv_head = torch.arange(n_heads, device=q.device) // (n_heads // n_heads_kv)
    k64 = k.double()[:, :, kv_head].permute(0, 2, 1, 3)  # (batch, heads, keys, d_head)
    v64 = v.double()[:, :, kv_head].permute(0, 2, 1, 3)
    sink = None if sinks is None else sinks.double().to(q.device)[None, :, None]  # (1, heads, 1)
    if sink is not None:
        lse[:] = sink

    first = 0
    while first < seq_len_q:
        keys = visible_keys(first, seq_len_q, seq_len_k, causal, window, diagonal_offset)
        most = max(1, MAX_SCORES // (batch * n_heads * max(1, len(keys))))
        last = first + 1  # neighbours that see the same keys are computed together
        while (
            last < min(seq_len_q, first + most)
            and visible_keys(last, seq_len_q, seq_len_k, causal, window, diagonal_offset) == keys
        ):
            last += 1
        if len(keys):
            rows = q[:, first:last].double().permute(0, 2, 1, 3)  # (batch, heads, rows, d_head)
            scores = scale * (rows @ k64[:, :, keys.start : keys.stop].mT)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if score_mod or mask_mod:
                scores = _modified(scores, first, keys, score_mod, mask_mod)
            total = torch.logsumexp(scores, -1)
            nothing = total == -math.inf  # scores of -inf alone: as if no key were visible
            total = total.masked_fill(total == math.inf, math.nan)
            if sink is not None:
                total = torch.logaddexp(total, sink)
            weights = torch.exp(scores - total[..., None]).masked_fill(nothing[..., None], 0.0)
            out[:, first:last] = (weights @ v64[:, :, keys.start : keys.stop]).permute(0, 2, 1, 3)
            lse[:, :, first:last] = total
        first = last
    return out, lse


def _modified(
    scores: Tensor,
    first: int,
    keys: range,
    score_mod: Callable[..., Tensor] | None,
    mask_mod: Callable[..., Tensor] | None,
) -> Tensor:
    """Scores (batch, heads, rows, keys) of the queries from ``first`` on, after functions of the user's."""
    batch, n_heads, rows, _ = scores.shape
    counts = (torch.arange(n, device=scores.device) for n in (batch, n_heads, rows))
    b, h, q = (x.view(-1, *[1] * (3 - axis)) for axis, x in enumerate(counts))
    k = torch.arange(keys.start, keys.stop, device=scores.device)
    if score_mod is not None:
        scores = torch.broadcast_to(score_mod(scores, b, h, q + first, k), scores.shape)
    if mask_mod is not None:
        scores = torch.where(mask_mod(b, h, q + first, k), scores, -math.inf)
    return scores


class ReferenceGradients(NamedTuple):
    """Gradients in float64; ``dsinks`` is None where there are no sinks."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None


def reference_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    **options: Any,
) -> ReferenceGradients:
    """Gradients of ``reference`` by PyTorch's differentiation in float64.

    Args:
        q, k, v, sinks, options: as ``reference`` takes them.
        dout: gradient of the output, (batch, seq_len_q, n_heads, d_head_v).
        dlse: gradient of the log-sum-exp, (batch, n_heads, seq_len_q), or None.
    """
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v, *(() if sinks is None else (sinks,)))]
    out, lse = reference(*inputs[:3], sinks=inputs[3] if sinks is not None else None, **options)
    seen = lse != -math.inf
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + (lse[seen] * dlse.double()[seen]).sum()
    found: Any = [None] * len(inputs)
    if loss.requires_grad:  # else no query sees a key
        found = torch.autograd.grad(loss, inputs, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]
    return ReferenceGradients(grads[0], grads[1], grads[2], grads[3] if sinks is not None else None)
