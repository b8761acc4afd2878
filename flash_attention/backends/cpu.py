"""The CPU backend: the contract of the kernels, executed with PyTorch.

Takes the same steps as a kernel and rounds where a kernel rounds: keys in blocks of ``B_c``, the last
block first; scores and softmax in float32; P rounded to the input type before P V, its row sum taken
before that rounding; float32 accumulation; one final rounding. Query rows do not depend on each other, so
that ``B_r`` has no influence on the result; here as many rows as fit the caches share one step.

Shapes in the comments: n = batch items x kv heads of a chunk, rows = queries x group, where group is the
number of query heads that share a kv head. Rows are ordered (query, head of the group), so that a range
of queries is a range of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flash_attention.backends import cpu_fused
from flash_attention.backends.cpu_dropout import BlockDropout
from flash_attention.backends.cpu_items import Item, items_of
from flash_attention.backends.cpu_mods import BlockMods
from flash_attention.backends.full_precision import full_precision
from flash_attention.backends.visibility import Visibility
from flash_attention.call import Call, Ran
from flash_helpers.kernels.kernel import ForwardConfig, ForwardKernel, Kernel
from flash_helpers.mods.tiles import Tile
from flash_helpers.select.chosen import Choice

LOG2_E = math.log2(math.e)
SMALLEST_NORMAL = 2.0**-126  # of float32
LARGEST = torch.finfo(torch.float32).max
LARGEST_CAP = 2.0**100  # no finite score is near it
FAR = 2.0**10  # an exponent of a row's maximum that the fused form would round too much
ROWS_PER_CHUNK = 4096  # with B_c of 64 to 512 a chunk's scores take 1 to 8 MiB: the L2 caches of a few cores


# Whatever the caller has made the defaults.
_FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


def run(call: Call, choice: Choice) -> Ran:
    """Computes a call, item by item, by PyTorch's own attention where it was chosen and computes the same.

    Returns:
        The chosen kernel, if it has run for any item; else the steps of its configuration.
    """
    kernels = [_run_item(call, choice, item) for item in items_of(call)]
    if not kernels:
        return Ran(None)
    return Ran(choice.kernel if choice.kernel in kernels else kernels[0])


def _run_item(call: Call, choice: Choice, item: Item) -> Kernel:
    """Computes an item; returns what has run."""
    q, k, v, out, lse, first = item
    scale, softcap, sinks, traced = call.scores
    # Of an item, limits may hide nothing although they do of the longest.
    left, right = call.mask.limits(q.shape[1], k.shape[1])
    n_heads, n_heads_kv = q.shape[2], k.shape[2]
    group = n_heads // n_heads_kv
    everything = (slice(0, q.shape[0]), slice(0, n_heads))
    mods = None
    places = range(first, first + q.shape[0]), range(n_heads), group
    if traced is not None:
        mods = BlockMods(traced, *places)
    dropout = None if call.dropout is None else BlockDropout(call.dropout, *places)
    left_over: list[Any] = [everything]
    if choice.fused:
        left_over = cpu_fused.attention(q, k, v, out, scale, left, right, lse)
    for parts, heads in left_over:
        heads_kv = slice(heads.start // group, -(-heads.stop // group))
        attention(
            choice.kernel.config,
            q[parts, :, heads],
            k[parts, :, heads_kv],
            v[parts, :, heads_kv],
            out[parts, :, heads],
            None if lse is None else lse[parts, heads],
            scale,
            left=left,
            right=right,
            softcap=softcap,
            sinks=None if sinks is None else sinks[heads],
            mods=None if mods is None else mods.part(parts, heads),
            dropout=None if dropout is None else dropout.part(parts, heads),
        )
    rows_left = sum((parts.stop - parts.start) * (heads.stop - heads.start) for parts, heads in left_over)
    if choice.fused and rows_left == q.shape[0] * n_heads:
        return ForwardKernel(choice.kernel.config, choice.kernel.traits)
    return choice.kernel


def forward(
    kernel: ForwardKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor | None,
    softmax_scale: float,
) -> None:
    """Runs one kernel on the CPU. The arguments are taken as checked.

    Args:
        kernel: configuration and traits.
        q: (batch, seq_len_q, n_heads, d_head), float16 or bfloat16, any strides.
        k: (batch, seq_len_k, n_heads_kv, d_head); n_heads_kv divides n_heads.
        v: (batch, seq_len_k, n_heads_kv, d_head_v).
        o: (batch, seq_len_q, n_heads, d_head_v), written.
        lse: (batch, n_heads, seq_len_q) float32, written with the natural logarithm of the softmax
            denominators; None: not wanted.
        softmax_scale: factor of the scores, any finite number.
    """
    right = 0 if kernel.traits.causal else None
    attention(kernel.config, q, k, v, o, lse, softmax_scale, right=right)


def attention(
    config: ForwardConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor | None,
    softmax_scale: float,
    *,
    left: int | None = None,
    right: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    mods: BlockMods | None = None,
    dropout: BlockDropout | None = None,
) -> None:
    """Attention with every feature; arguments as in ``forward``.

    Args:
        left: see ``Visibility``.
        right: see ``Visibility``.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0: they stay.
        sinks: (n_heads,) one more logit a head that takes its share of the softmax and has no value.
        mods: what changes scores, behind the soft cap, and hides keys; None: nothing.
        dropout: what is dropped of P; None: nothing.
    """
    batch, seq_len_q, n_heads, _ = q.shape
    n_heads_kv = k.shape[2]
    if not o.numel() and not (lse is not None and lse.numel()):
        return
    visibility = Visibility(left, right, k.shape[1] - seq_len_q)
    group = n_heads // n_heads_kv
    for items, heads_kv, queries in _chunks(batch, n_heads_kv, seq_len_q, group):
        heads = slice(heads_kv.start * group, heads_kv.stop * group)
        own = None if mods is None else mods.part(items, heads)
        dropped = None if dropout is None else dropout.part(items, heads)
        rows = q[items, queries, heads]
        chunk = _Chunk(config, rows, v.shape[3], group, softmax_scale, softcap, own, dropped)
        with full_precision:
            chunk.attend(k[items, :, heads_kv], v[items, :, heads_kv], visibility, queries.start)
        chunk.finish(
            o[items, queries, heads],
            None if lse is None else lse[items, heads, queries],
            None if sinks is None else sinks[heads],
        )


def _chunks(batch: int, n_heads_kv: int, seq_len_q: int, group: int) -> Iterator[tuple[slice, slice, slice]]:
    """Parts of up to ``ROWS_PER_CHUNK`` rows: ranges of batch items, of kv heads and of queries."""
    queries = min(seq_len_q, max(1, ROWS_PER_CHUNK // group))
    heads = min(n_heads_kv, max(1, ROWS_PER_CHUNK // (queries * group)))
    items = min(batch, max(1, ROWS_PER_CHUNK // (queries * group * heads)))
    for b in range(0, batch, items):
        for h in range(0, n_heads_kv, heads):
            for i in range(0, seq_len_q, queries):
                yield (
                    slice(b, min(b + items, batch)),
                    slice(h, min(h + heads, n_heads_kv)),
                    slice(i, min(i + queries, seq_len_q)),
                )


class _Chunk:
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
        self.q = torch.empty(*self.shape, d_head, **_FLOAT32)
        self.q.copy_(q.unflatten(2, (-1, group)).transpose(1, 2))
        self.q = self.q.view(n, rows, d_head)
        if folded and softmax_scale < 0:
            self.q.neg_()
        self.o = torch.zeros(n, rows, d_head_v, **_FLOAT32)  # sum of P V, relative to the running maximum
        self.row_max = torch.full((n, rows, 1), -math.inf, **_FLOAT32)  # of the scores so far
        self.row_sum = torch.zeros(n, rows, 1, **_FLOAT32)  # of exp(score - row_max) so far
        self._scores = torch.empty(n * rows * self.B_c, **_FLOAT32)
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
                self._step(
                    _rows_of(k[:, first:last]),
                    _rows_of(v[:, first:last]),
                    slice(some * self.group, past * self.group),
                    visibility,
                    first_query + some,
                    first,
                )

    def _step(
        self, k: Tensor, v: Tensor, rows: slice, visibility: Visibility, first_query: int, first_key: int
    ) -> None:
        """One block of keys for the rows that see any: k (n, keys, d_head), v (n, keys, d_head_v)."""
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


def _rows_of(x: Tensor) -> Tensor:
    """(items, keys, kv heads, d) in 16 bit as (n, keys, d) in float32."""
    items, keys, heads, d = x.shape
    rows = torch.empty(items, heads, keys, d, **_FLOAT32).copy_(x.transpose(1, 2))
    return rows.view(items * heads, keys, d)
