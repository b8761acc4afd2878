"""The backward pass of the CPU backend: the contract of the backward kernels, executed with PyTorch.

Takes the steps of a kernel and rounds where a kernel rounds: P is computed again from the scores and the
log-sum-exp in float32; P and dS are rounded to the input type before their products; sums are float32, with
one final rounding. With ``D = rowsum(dO * O) - dLSE`` of a query row:

    dV = P^T dO        dP = dO V^T        dS = P * (dP - D)        dQ = scale dS K        dK = scale dS^T Q

Where dropout keeps an element, dV takes P / (1 - p), and dP is divided by 1 - p; where it drops one, both are
0. A score function multiplies dS by its derivative, and a soft cap c by ``1 - (s / c)^2`` of the capped
score s. The gradient of a head's sink is the sum over its rows of ``-exp(sink - LSE) D``.

Shapes in the comments: n = batch items x kv heads of a chunk, rows = queries x group, as in ``cpu``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flash_attention.backends.cpu import _chunks
from flash_attention.backends.cpu_dropout import BlockDropout
from flash_attention.backends.cpu_mods import BlockMods
from flash_attention.backends.cpu_rows import LARGEST_CAP, rows_of
from flash_attention.backends.full_precision import full_precision
from flash_attention.backends.sink_gradient import sink_gradient
from flash_attention.backends.visibility import Visibility
from flash_helpers.kernels.kernel import ForwardConfig
from flash_helpers.mods.tiles import Tile


@dataclass(frozen=True)
class Gradients:
    """Where gradients are written; None: not wanted, and not computed.

    Attributes:
        dq: (batch, seq_len_q, n_heads, d_head), any strides.
        dk: (batch, seq_len_k, n_heads_kv, d_head).
        dv: (batch, seq_len_k, n_heads_kv, d_head_v).
        dsinks: (n_heads,).
        captured: by the places of captured tensors of real numbers: float64, contiguous, of their shapes.
            What is computed is added to them, so that a call of several parts is rounded once.
    """

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsinks: Tensor | None = None
    captured: Mapping[int, Tensor] = field(default_factory=dict)

    def of(self, items: slice, heads: slice, heads_kv: slice) -> Gradients:
        """Where those of some heads of some batch items are written."""
        return Gradients(
            None if self.dq is None else self.dq[items, :, heads],
            None if self.dk is None else self.dk[items, :, heads_kv],
            None if self.dv is None else self.dv[items, :, heads_kv],
            None if self.dsinks is None else self.dsinks[heads],
            self.captured,
        )


def backward(
    config: ForwardConfig,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    softmax_scale: float,
    gradients: Gradients,
    *,
    left: int | None = None,
    right: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    mods: BlockMods | None = None,
    dropout: BlockDropout | None = None,
) -> None:
    """Writes the gradients of one attention call. The arguments are taken as checked.

    Args:
        config: how keys are tiled; ``B_c`` keys a step.
        do: (batch, seq_len_q, n_heads, d_head_v), gradient of the output, any strides.
        q: (batch, seq_len_q, n_heads, d_head).
        k: (batch, seq_len_k, n_heads_kv, d_head).
        v: (batch, seq_len_k, n_heads_kv, d_head_v).
        o: (batch, seq_len_q, n_heads, d_head_v), what the forward pass returned.
        lse: (batch, n_heads, seq_len_q) float32, its log-sum-exp.
        dlse: gradient of ``lse``, or None.
        softmax_scale: as in the forward pass.
        gradients: what is wanted. Rows and keys that take no part get exact zeros, whatever they hold.
        left: see ``Visibility``.
        right: see ``Visibility``.
        softcap: as in the forward pass; 0: none.
        sinks: (n_heads,), as in the forward pass.
        mods: as in the forward pass.
        dropout: as in the forward pass.
    """
    batch, seq_len_q, n_heads, _ = q.shape
    seq_len_k, n_heads_kv = k.shape[1:3]
    group = n_heads // n_heads_kv
    visibility = Visibility(left, right, seq_len_k - seq_len_q)
    delta = delta_of(do, o, lse, dlse)
    if gradients.dsinks is not None:
        assert sinks is not None
        gradients.dsinks.copy_(sink_gradient(sinks, lse, delta))
    for wanted in (gradients.dq, gradients.dk, gradients.dv):
        if wanted is not None:
            wanted.zero_()
    sums = gradients.captured
    if gradients.dq is None and gradients.dk is None and gradients.dv is None and not sums:
        return
    # Keys and queries that take part: what lies outside may hold anything.
    begin, end = visibility.keys_of(0, seq_len_q)
    keys = slice(max(begin, 0), max(min(end, seq_len_k), max(begin, 0)))
    begin, end = visibility.queries_of(0, seq_len_k)
    seeing = slice(max(begin, 0), max(min(end, seq_len_q), max(begin, 0)))
    if keys.start == keys.stop or seeing.start == seeing.stop:
        return
    inner = Visibility(left, right, visibility.offset + seeing.start - keys.start)
    k, v = k[:, keys], v[:, keys]
    rows = (do[:, seeing], q[:, seeing], lse[:, :, seeing], delta[:, :, seeing])
    dq = None if gradients.dq is None else gradients.dq[:, seeing]
    dk, dv = (
        None if wanted is None else torch.zeros(x.shape, dtype=torch.float32, device="cpu")
        for wanted, x in ((gradients.dk, k), (gradients.dv, v))
    )
    for items, heads_kv, queries in _chunks(batch, n_heads_kv, seeing.stop - seeing.start, group):
        heads = slice(heads_kv.start * group, heads_kv.stop * group)
        do_rows, q_rows = (x[items, queries, heads] for x in rows[:2])
        lse_rows, delta_rows = (x[items, heads, queries] for x in rows[2:])
        own = None if mods is None else mods.part(items, heads).differentiated(tuple(sums))
        chunk = _Chunk(
            config.B_c, group, softmax_scale, softcap, inner, queries.start,
            do_rows, q_rows, lse_rows, delta_rows, own, (seeing.start, keys.start), sums,
            None if dropout is None else dropout.part(items, heads),
        )  # fmt: skip
        with full_precision:
            chunk.take(
                k[items, :, heads_kv],
                v[items, :, heads_kv],
                None if dk is None else dk[items, :, heads_kv],
                None if dv is None else dv[items, :, heads_kv],
                None if dq is None else dq[items, queries, heads],
            )
    if gradients.dk is not None and dk is not None:
        gradients.dk[:, keys].copy_(dk.mul_(softmax_scale))
    if gradients.dv is not None and dv is not None:
        gradients.dv[:, keys].copy_(dv if dropout is None else dv.mul_(dropout.factor))


def delta_of(do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """``rowsum(dO * O) - dLSE``, (batch, n_heads, seq_len_q) float32; 0 in rows without a key or a sink."""
    delta = (do.float() * o.float()).sum(-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse.float()
    return delta.masked_fill(lse == -math.inf, 0.0)


class _Chunk:
    """Some query rows of some heads, which take all their keys block by block."""

    def __init__(
        self,
        B_c: int,
        group: int,
        softmax_scale: float,
        softcap: float,
        visibility: Visibility,
        first_query: int,
        do: Tensor,
        q: Tensor,
        lse: Tensor,
        delta: Tensor,
        mods: BlockMods | None,
        origin: tuple[int, int],
        sums: Mapping[int, Tensor],
        dropout: BlockDropout | None,
    ) -> None:
        # The mods count queries and keys from the begin of the sequence: ours are that many further.
        self.mods, self.origin, self.sums, self.dropout = mods, origin, sums, dropout
        self.B_c, self.group, self.scale = B_c, group, softmax_scale
        self.softcap = min(softcap, LARGEST_CAP)
        self.visibility, self.first_query = visibility, first_query
        self.dtype, self.n_queries = q.dtype, q.shape[1]
        self.q, self.do = self._rows(q), self._rows(do)  # (n, rows, d)
        # A row without a key has scores of -inf alone: any finite LSE makes its P zero.
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        self.lse, self.delta = self._row_values(lse), self._row_values(delta)  # (n, rows, 1)

    def _rows(self, x: Tensor) -> Tensor:
        """(items, queries, heads, d) in 16 bit as (n, rows, d) in float32."""
        return x.float().unflatten(2, (-1, self.group)).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _row_values(self, x: Tensor) -> Tensor:
        """(items, heads, queries) as (n, rows, 1)."""
        return x.unflatten(1, (-1, self.group)).transpose(2, 3).flatten(2, 3).flatten(0, 1)[..., None]

    def take(self, k: Tensor, v: Tensor, dk: Tensor | None, dv: Tensor | None, dq: Tensor | None) -> None:
        """Adds to dk, dv (items, keys, kv heads, d), float32, and writes dq (items, queries, heads, d)."""
        sum_q = torch.zeros_like(self.q)
        for first in range(0, k.shape[1], self.B_c):
            last = min(first + self.B_c, k.shape[1])
            some, past = self.visibility.queries_of(first, last)
            some, past = max(some - self.first_query, 0), min(past - self.first_query, self.n_queries)
            if some >= past:
                continue
            queries = range(self.first_query + some, self.first_query + past)
            tile = self._tile(queries, range(first, last))
            if tile is Tile.EMPTY:
                continue
            rows = slice(some * self.group, past * self.group)
            block_k, block_v = rows_of(k[:, first:last]), rows_of(v[:, first:last])
            p, ds = self._p_and_ds(block_k, block_v, rows, self.first_query + some, first, tile)
            items, heads = k.shape[0], k.shape[2]
            for sums, left_side, right_side in ((dv, p, self.do), (dk, ds, self.q)):
                if sums is not None:
                    product = torch.bmm(left_side.mT, right_side[:, rows])  # (n, keys, d)
                    sums[:, first:last] += product.unflatten(0, (items, heads)).transpose(1, 2)
            if dq is not None:
                sum_q[:, rows] += torch.bmm(ds, block_k)
        if dq is not None:
            sum_q = sum_q.mul_(self.scale).unflatten(0, (k.shape[0], -1))
            dq.copy_(sum_q.unflatten(2, (self.n_queries, self.group)).transpose(1, 2).flatten(2, 3))

    def _absolute(self, queries: range, keys: range) -> tuple[range, range]:
        q, k = self.origin
        return range(queries.start + q, queries.stop + q), range(keys.start + k, keys.stop + k)

    def _tile(self, queries: range, keys: range) -> Tile:
        return Tile.FULL if self.mods is None else self.mods.tile(*self._absolute(queries, keys))

    def _p_and_ds(
        self, k: Tensor, v: Tensor, rows: slice, first_query: int, first_key: int, tile: Tile
    ) -> tuple[Tensor, Tensor]:
        """P, without what is dropped, and dS of a block, (n, rows, keys), rounded to the input type."""
        s = torch.bmm(self.q[:, rows], k.mT).mul_(self.scale)
        slope = None
        if self.softcap:
            tanh = torch.tanh(s / self.softcap)
            s, slope = tanh * self.softcap, 1.0 - tanh * tanh
        queries = range(first_query, first_query + (rows.stop - rows.start) // self.group)
        places = self._absolute(queries, range(first_key, first_key + k.shape[1]))
        given = s
        if self.mods is not None:
            s = s.clone()
            self.mods.apply(s, *places, tile)
        if not self.visibility.unlimited:
            self.visibility.hide(s.unflatten(1, (-1, self.group)), first_query, first_key)
        hidden = s == -math.inf
        p = torch.exp(s - self.lse[:, rows])
        dp = torch.bmm(self.do[:, rows], v.mT)
        if self.dropout is not None:
            self.dropout.apply(dp.mul_(self.dropout.factor), *places)
        ds = dp.sub_(self.delta[:, rows]).mul_(p)
        ds.masked_fill_(hidden, 0.0)
        if self.mods is not None:
            self.mods.slopes(ds, given, *places, self.sums)
        if slope is not None:
            ds.mul_(slope)
        p = p.to(self.dtype).float()
        if self.dropout is not None:
            self.dropout.apply(p, *places)
        return p, ds.to(self.dtype).float()
