"""PyTorch's own fused attention on the CPU, for calls of which it computes the same as ``cpu.attention``.

It rounds where a kernel rounds, too: scores and softmax in float32, P to the input type before P V, float32
accumulation, one final rounding. On processors with matrix units for 16-bit numbers it is several times as
fast as products of float32 tensors, PyTorch's only other products with a float32 result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attention.backends.visibility import Visibility

QUERIES_PER_CALL = 512  # under a mask, whose hidden keys cost time


class Part(NamedTuple):
    """Some query heads of some batch items; of one head, or of all."""

    items: slice
    heads: slice


_fused: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def reason_against(
    d_head: int,
    d_head_v: int,
    softcap: bool,
    sinks: bool,
    lse: bool,
    out_float32: bool = False,
    mods: bool = False,
    dropout: bool = False,
) -> str | None:
    """Why PyTorch's fused attention does not compute such calls, or None."""
    if _fused is None:
        return f"torch {torch.__version__} does not have it"
    if softcap or sinks:
        return f"it has no {'soft cap' if softcap else 'sinks'}"
    if mods:
        return "it takes no score_mod and no mask_mod"
    if dropout:
        return "its random bits are others than this library's"
    if d_head != d_head_v:
        return "it takes one head size for all tensors"
    if out_float32:
        return "it rounds its output"
    if lse:
        return "its log-sum-exp is off by up to 1e-4"
    return None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    softmax_scale: float,
    left: int | None,
    right: int | None,
    lse: Tensor | None = None,
) -> list[Part]:
    """Attention without further features; arguments as in ``cpu.attention``.

    Args:
        lse: is written with PyTorch's own, which is off by up to 1e-4: exact enough for gradients alone.

    Returns:
        What is left for ``cpu.attention``. Each head of a batch item in which a score is NaN or infinite or a
        log-sum-exp exactly 0, by itself; all in one where a scale of 0 meets a mask, or where PyTorch raises.
        The others are written, and feel nothing of these.
    """
    batch, seq_len_q, n_heads, _ = q.shape
    seq_len_k, n_heads_kv = k.shape[1:3]
    everything = Part(slice(0, batch), slice(0, n_heads))
    if left is not None and right is not None and left + right < 0:
        return [everything]  # no query sees a key
    visibility = Visibility(left, right, seq_len_k - seq_len_q)
    begin, end = visibility.queries_of(0, seq_len_k)  # the queries that see any key
    begin = min(max(begin, 0), seq_len_q)
    end = max(min(end, seq_len_q), begin) if seq_len_k else begin
    for blind in (slice(0, begin), slice(end, seq_len_q)):
        o[:, blind].zero_()
        if lse is not None:
            lse[:, :, blind].fill_(-math.inf)
    if softmax_scale == 0 and not visibility.unlimited:
        return [everything]  # 0 times a hidden score of -inf is NaN
    if softmax_scale < 0:  # it scales what it has hidden, too
        q, softmax_scale = -q, -softmax_scale
    k, v = _usable(k), _usable(v)
    done = torch.ones(batch, n_heads_kv, n_heads // n_heads_kv, dtype=torch.bool, device="cpu")
    for queries, keys in calls_of(visibility, slice(begin, end), seq_len_k):
        causal = is_triangle(visibility, queries, keys)
        mask = None if causal else mask_of_reversed(visibility, queries, keys, q.dtype)
        q_part = _usable(q[:, queries] if mask is None else q[:, queries].flip(1))
        part_lse = None if lse is None else lse[:, :, queries]
        parts = _heads_as_batch(q_part, k[:, keys], v[:, keys], o[:, queries], done, part_lse)
        for part, target, part_done, target_lse in parts:
            try:
                result, sums = _fused(*part, is_causal=causal, attn_mask=mask, scale=softmax_scale)
            except RuntimeError:  # as with matrix units under ATEN_CPU_CAPABILITY=avx2, of torch 2.13
                return [everything]
            # It says 0 of a row without scores, too; and up to 15 scores that are all NaN are none to it.
            known = sums.isfinite() & (sums != 0)
            part_done &= known.reshape(*part_done.shape, -1).all(-1)
            target.copy_(result if mask is None else result.flip(-2))
            if target_lse is not None:
                target_lse.copy_(sums if mask is None else sums.flip(-1))
        if not done.any():
            break
    left_over = (~done.flatten(1)).nonzero().tolist()
    return [Part(slice(item, item + 1), slice(head, head + 1)) for item, head in left_over]


def calls_of(visibility: Visibility, seeing: slice, seq_len_k: int) -> Iterator[tuple[slice, slice]]:
    """The queries of each call and the keys that they see: one call where that needs no mask of its own."""

    def keys_of(queries: slice) -> slice:
        first, last = visibility.keys_of(queries.start, queries.stop)
        return slice(max(first, 0), min(last, seq_len_k))

    whole = visibility.unlimited or is_triangle(visibility, seeing, keys_of(seeing))
    step = max(seeing.stop - seeing.start, 1) if whole else QUERIES_PER_CALL
    for first in range(seeing.start, seeing.stop, step):
        queries = slice(first, min(first + step, seeing.stop))
        yield queries, keys_of(queries)


def is_triangle(visibility: Visibility, queries: slice, keys: slice) -> bool:
    """Whether these are as many keys as queries, and query i sees keys 0 … i."""
    return (
        visibility.left is None
        and visibility.right is not None
        and visibility.keys_of(queries.start, queries.start + 1)[1] == keys.start + 1
        and keys.stop - keys.start == queries.stop - queries.start
    )


def mask_of_reversed(
    visibility: Visibility, queries: slice, keys: slice, dtype: torch.dtype
) -> Tensor | None:
    """What is added to the scores of the queries, last one first: (queries, keys); None: nothing is hidden.

    What a query sees depends on the key's distance from it alone. With the queries reversed, distances grow
    from query to query as from key to key, so that one row of numbers, a step further for each query, is the
    mask: it takes no memory to speak of.
    """
    n_queries, n_keys = queries.stop - queries.start, keys.stop - keys.start
    if visibility.unlimited or n_queries == 1:  # one query sees all of its range
        return None
    last_place = queries.stop - 1 + visibility.offset
    distance = torch.arange(n_queries + n_keys - 1, device="cpu") + (keys.start - last_place)
    row = torch.zeros(distance.shape, dtype=dtype, device="cpu")
    if visibility.left is not None:
        row.masked_fill_(distance < -visibility.left, -math.inf)
    if visibility.right is not None:
        row.masked_fill_(distance > visibility.right, -math.inf)
    return row.as_strided((n_queries, n_keys), (1, 1))


def _heads_as_batch(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, flags: Tensor, lse: Tensor | None
) -> Iterator[tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor, Tensor | None]]:
    """Calls that know no groups of heads: inputs (batch, heads, seq, d), where outputs, flags, LSEs belong.

    The query heads of a group share a head of K and V without a copy: those of one batch item are a batch of
    their own, or every call takes one head of each group, whichever makes fewer calls.
    """
    batch, seq_len_q, n_heads, _ = q.shape
    n_heads_kv = k.shape[2]
    group = n_heads // n_heads_kv
    # (batch, kv heads, group, seq, d)
    q, o = (x.unflatten(2, (n_heads_kv, group)).permute(0, 2, 3, 1, 4) for x in (q, o))
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if lse is not None:
        lse = lse.unflatten(1, (n_heads_kv, group))
    if seq_len_q == 1:  # the heads of a group are rows of one head
        yield (q[..., 0, :], k, v), o[..., 0, :], flags, None if lse is None else lse[..., 0]
    elif batch < group:
        for i in range(batch):
            one_k, one_v = (x[i, :, None].expand(-1, group, -1, -1) for x in (k, v))
            yield (q[i], one_k, one_v), o[i], flags[i], None if lse is None else lse[i]
    else:
        for i in range(group):
            yield (q[:, :, i], k, v), o[:, :, i], flags[:, :, i], None if lse is None else lse[:, :, i]


def _usable(x: Tensor) -> Tensor:
    """The tensor with strides that matrix products take: rows follow each other, of elements side by side."""
    if x.stride(-1) == 1 and x.stride(1) >= x.shape[-1]:
        return x
    return x.contiguous()
