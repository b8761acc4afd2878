"""The running state of some rows of queries on the CPU, as a thread block keeps it, tile by tile of keys."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flash_attention.backends.cpu_dropout import BlockDropout
from flash_attention.backends.cpu_mods import BlockMods
from flash_attention.backends.visibility import Visibility
from flash_helpers.kernels.kernel import ForwardConfig
from flash_helpers.mods.tiles import Tile

LOG2_E = math.log2(math.e)
SMALLEST_NORMAL = 2.0**-126  # of float32
LARGEST = torch.finfo(torch.float32).max
LARGEST_CAP = 2.0**100  # no finite score is near it
FAR = 2.0**10  # an exponent of a row's maximum that the fused form would round too much

# Whatever the caller has made the defaults.
FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


class Chunk:
    """The running state of a chunk's rows as a thread block keeps it: outputs, maxima and sums."""

    def __init__(
        self,
        config: ForwardConfig,
        q: Tensor,
        d_head_v: int,
        group: int,
        softmax_scale: float,
        softcap: float,
        mods: BlockMods | None = None,
        dropout: BlockDropout | None = None,
    ) -> None:
        items, queries, n_heads, d_head = q.shape
        self.mods, self.dropout = mods, dropout
        self.B_c = config.B_c
        self.dtype = q.dtype
        self.group = group
        self.softcap = min(softcap, LARGEST_CAP)
        self.shape = (items, n_heads // group, queries, group)
        self.fused_exponent = config.optimized_softmax
        # With the optimized softmax the scale waits for the exponent; what changes scores needs scaled ones.
        folded = config.optimized_softmax and not softcap and mods is None
        self.score_factor = 1.0 if folded else softmax_scale
        if softcap:
            self.score_factor = max(-LARGEST, min(softmax_scale / self.softcap, LARGEST))
        # natural logit = score * unit. Maxima are taken of unscaled scores then, so a negative scale goes
        # to Q, and for a zero scale unit is too small for any score to feel, while masked ones stay -inf.
        self.unit = max(abs(softmax_scale), SMALLEST_NORMAL) if folded else 1.0
        self.to_log2 = min(self.unit * LOG2_E, LARGEST / 2)

        n, rows = items * (n_heads // group), queries * group
        self.q = torch.empty(*self.shape, d_head, **FLOAT32)
        self.q.copy_(q.unflatten(2, (-1, group)).transpose(1, 2))
        self.q = self.q.view(n, rows, d_head)
        if folded and softmax_scale < 0:
            self.q.neg_()
        self.o = torch.zeros(n, rows, d_head_v, **FLOAT32)  # sum of P V, relative to the running maximum
        self.row_max = torch.full((n, rows, 1), -math.inf, **FLOAT32)  # of the scores so far
        self.row_sum = torch.zeros(n, rows, 1, **FLOAT32)  # of exp(score - row_max) so far
        self._scores = torch.empty(n * rows * self.B_c, **FLOAT32)
        self._p = torch.empty(n * rows * self.B_c, dtype=self.dtype, device="cpu")

    def attend(self, k: Tensor, v: Tensor, visibility: Visibility, first_query: int) -> None:
        """Takes all visible keys, block by block: k, v (items, keys, kv heads, d)."""
        queries = self.shape[2]
        begin, end = visibility.keys_of(first_query, first_query + queries)
        end = min(end, k.shape[1])
        begin = max(begin, 0)
        for block in reversed(range(begin // self.B_c * self.B_c, end, self.B_c)):
            # Of the keys that no query sees nothing is read: they may hold NaN.
            first, last = max(block, begin), min(block + self.B_c, end)
            some, past = visibility.queries_of(first, last)
            some, past = max(some - first_query, 0), min(past - first_query, queries)
            if some < past:
                self.step(
                    rows_of(k[:, first:last]),
                    rows_of(v[:, first:last]),
                    slice(some * self.group, past * self.group),
                    visibility,
                    first_query + some,
                    first,
                )

    def step(
        self,
        k: Tensor,
        v: Tensor,
        rows: slice,
        visibility: Visibility,
        first_query: int,
        first_key: int,
        n_keys: int | None = None,
    ) -> None:
        """One block of keys for the rows that see any: k (n, keys, d_head), v (n, keys, d_head_v).

        Args:
            n_keys: so many of them, the first, exist; None: all.
        """
        queries = range(first_query, first_query + (rows.stop - rows.start) // self.group)
        keys, tile = range(first_key, first_key + k.shape[1]), Tile.FULL
        if self.mods is not None:
            tile = self.mods.tile(queries, keys)
            if tile is Tile.EMPTY:
                return
        q, o = self.q[:, rows], self.o[:, rows]
        row_max, row_sum = self.row_max[:, rows], self.row_sum[:, rows]
        shape = (q.shape[0], q.shape[1], k.shape[1])  # (n, rows, keys)
        s = self._scores[: math.prod(shape)].view(shape)
        torch.bmm(q, k.mT, out=s)
        if self.softcap:
            s.mul_(self.score_factor).tanh_().mul_(self.softcap)
        elif self.score_factor != 1.0:
            s.mul_(self.score_factor)
        if self.mods is not None:
            self.mods.apply(s, queries, keys, tile)
        if not visibility.unlimited:
            visibility.hide(s.unflatten(1, (-1, self.group)), first_query, first_key)
        if n_keys is not None:
            s[..., n_keys:] = -math.inf

        new_max = torch.maximum(row_max, s.amax(-1, keepdim=True))
        base = _finite(new_max)
        if self.fused_exponent:
            far = torch.where(base.abs() * self.to_log2 > FAR, base, 0.0)  # 0 changes no bit of the others
            if far.any():
                s.sub_(far)
            p = torch.add((base - far) * -self.to_log2, s, alpha=self.to_log2, out=s).exp2_()
        else:
            p = s.sub_(base).mul_(self.to_log2).exp2_()
        rescale = ((row_max - base) * self.to_log2).exp2_()
        row_max.copy_(new_max)
        row_sum.mul_(rescale).add_(p.sum(-1, keepdim=True))
        rounded = self._p[: math.prod(shape)].view(shape).copy_(p)
        p.copy_(rounded)
        if self.dropout is not None:
            self.dropout.apply(p, queries, keys)
        o.mul_(rescale).baddbmm_(p, v)

    def finish(self, o: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
        """Divides by the sums and writes o (items, queries, heads, d_head_v), lse (items, heads, queries)."""
        _, heads_kv, _, group = self.shape
        row_max = (self.row_max * self.unit).view(self.shape)
        row_sum = self.row_sum.view(self.shape)
        acc = self.o.view(*self.shape, -1)
        if self.dropout is not None:
            acc = acc * self.dropout.factor
        nothing = row_sum == 0  # no visible key, or scores of -inf alone
        if sinks is not None:
            sink = sinks.float().view(1, heads_kv, 1, group)
            with_sink = torch.maximum(row_max, sink)
            base = _finite(with_sink)
            rescale = torch.exp(row_max - base)
            of_sink = torch.exp(sink - base).masked_fill(sink == base, 1.0)  # also of one of inf
            row_sum = row_sum * rescale + of_sink
            acc = acc * rescale[..., None]
            row_max = with_sink
        acc = (acc / row_sum[..., None]).masked_fill(nothing[..., None], 0.0)
        o.copy_(acc.transpose(1, 2).flatten(2, 3))
        if lse is not None:
            lse.copy_((row_max + row_sum.log()).transpose(2, 3).flatten(1, 2))


def _finite(row_max: Tensor) -> Tensor:
    """For a row of scores of -inf alone: -inf - -inf would be NaN, while any finite base makes its P zero."""
    return row_max.masked_fill(row_max == -math.inf, 0.0)


def rows_of(x: Tensor) -> Tensor:
    """(items, keys, kv heads, d) in 16 bit as (n, keys, d) in float32."""
    items, keys, heads, d = x.shape
    rows = torch.empty(items, heads, keys, d, **FLOAT32).copy_(x.transpose(1, 2))
    return rows.view(items * heads, keys, d)
