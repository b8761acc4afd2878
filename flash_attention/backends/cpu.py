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

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from flash_attention.backends import cpu_fused, cpu_invariant
from flash_attention.backends.cpu_dropout import BlockDropout
from flash_attention.backends.cpu_items import Item, items_of
from flash_attention.backends.cpu_mods import BlockMods
from flash_attention.backends.cpu_rows import Chunk
from flash_attention.backends.full_precision import full_precision
from flash_attention.backends.visibility import Visibility
from flash_attention.call import Call, Ran
from flash_helpers.kernels.kernel import ForwardConfig, ForwardKernel, Kernel
from flash_helpers.select.chosen import Choice

ROWS_PER_CHUNK = 4096  # with B_c of 64 to 512 a chunk's scores take 1 to 8 MiB: the L2 caches of a few cores


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
    if call.invariant:
        cpu_invariant.attention(
            choice.kernel.config,
            q,
            k,
            v,
            out,
            lse,
            scale,
            left=left,
            right=right,
            softcap=softcap,
            sinks=sinks,
        )
        return choice.kernel
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
        chunk = Chunk(config, rows, v.shape[3], group, softmax_scale, softcap, own, dropped)
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
