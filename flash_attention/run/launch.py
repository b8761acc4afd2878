"""The way of a checked call with its chosen kernel into a backend."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_attention.backends import backend
from flash_attention.checks.memory import misalignment
from flash_helpers.kernels.kernel import ForwardKernel
from flash_helpers.select.problem import AttentionProblem, visible_limits
from flash_helpers.select.select import Choice


class Ran(NamedTuple):
    """What ``run_cuda`` has launched.

    Attributes:
        kernel: the kernel.
        launched: its launch (``backends.cuda.Launched``).
        workspace: float32 memory for the parts of split keys, or None.
    """

    kernel: ForwardKernel
    launched: Any
    workspace: Tensor | None


def run_cpu(
    choice: Choice,
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> ForwardKernel:
    """Computes by PyTorch's own attention, or with the CPU backend, which takes every layout and feature.

    Returns:
        What has run: the chosen kernel, or, where PyTorch's attention has computed nothing, the steps of its
        configuration.
    """
    # Of a packed sequence or a cache, limits may hide nothing although they do of the longest.
    left, right = visible_limits(False, (problem.left, problem.right), q.shape[1], k.shape[1])
    group = problem.n_heads // problem.n_heads_kv
    everything = (slice(0, q.shape[0]), slice(0, problem.n_heads))
    left_over = [everything]
    if choice.fused:
        left_over = backend("cpu_fused").attention(q, k, v, out, scale, left, right)
    for items, heads in left_over:
        heads_kv = slice(heads.start // group, -(-heads.stop // group))
        backend("cpu").attention(
            choice.kernel.config,
            q[items, :, heads],
            k[items, :, heads_kv],
            v[items, :, heads_kv],
            out[items, :, heads],
            None if lse is None else lse[items, heads],
            scale,
            left=left,
            right=right,
            softcap=softcap,
            sinks=None if sinks is None else sinks[heads],
        )
    if choice.fused and left_over == [everything]:
        return ForwardKernel(choice.kernel.config, choice.kernel.traits)
    return choice.kernel


class Cache(NamedTuple):
    """What a cache of keys holds.

    Attributes:
        seqused_k: (batch,) int32, how many keys of each batch item there are.
        block_table: (batch, max_pages) int32, the pages of each batch item; None: item b has k[b] and v[b].
    """

    seqused_k: Tensor
    block_table: Tensor | None


def run_cuda(
    choice: Choice,
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    offsets: tuple[Tensor, Tensor] | None = None,
    cache: Cache | None = None,
) -> Ran:
    """Launches a kernel on tensors brought into the form it takes: padded, aligned, with a scale >= 0.

    Args:
        offsets: cu_seqlens_q and cu_seqlens_k of packed sequences, (total, heads, d).
        cache: what k and v hold, where they are a cache.
    """
    cuda, traits = backend("cuda"), choice.kernel.traits
    d_head, d_head_v = choice.head_sizes
    if traits.padded_head:
        d_head, d_head_v = problem.d_head, problem.d_head_v
    if choice.problem is not None:
        problem = choice.problem
        if cache is None:
            k, v = k[:, -problem.seq_len_k :], v[:, -problem.seq_len_k :]
    if scale < 0:
        q, scale = -q, -scale
    q, k, v = _fitted(q, d_head), _fitted(k, d_head), _fitted(v, d_head_v)
    o = out if out.shape[-1] == d_head_v else out.new_empty((*out.shape[:-1], d_head_v))
    target, features, workspace = o, None, None
    if not choice.is_plain or d_head != d_head_v:
        sinks = None if sinks is None else sinks.float().contiguous()
        n_rows = choice.n_splits * problem.batch * problem.n_heads * problem.seq_len_q
        if traits.split:
            # Outputs, then LSEs of the parts. It is given out again only after the stream has used it.
            workspace = q.new_empty(n_rows * (d_head_v + 1), dtype=torch.float32)
        table = None if cache is None or cache.block_table is None else cache.block_table.contiguous()
        features = cuda.Features(
            d_head_v=d_head_v,
            window_left=cuda.window_side(problem.left),
            window_right=cuda.window_side(problem.right),
            softcap=softcap,
            sinks=0 if sinks is None else sinks.data_ptr(),
            cu_seqlens_q=0 if offsets is None else offsets[0].data_ptr(),
            cu_seqlens_k=0 if offsets is None else offsets[1].data_ptr(),
            seqused_k=0 if cache is None else cache.seqused_k.data_ptr(),
            total_q=0 if offsets is None else q.shape[0],
            total_k=0 if offsets is None else k.shape[0],
            n_splits=choice.n_splits,
            partial_o=0 if workspace is None else workspace.data_ptr(),
            partial_lse=0 if workspace is None else workspace[n_rows * d_head_v :].data_ptr(),
            block_table=0 if table is None else table.data_ptr(),
            max_pages=0 if table is None else table.shape[1],
            page_size=0 if table is None else k.shape[1],
        )
    if offsets is not None:
        q, target = (_as_sequences(x, problem.batch, problem.seq_len_q) for x in (q, o))
        k, v = (_as_sequences(x, problem.batch, x.shape[0]) for x in (k, v))
    elif problem.n_heads != q.shape[2]:
        q, target = _groups_as_rows(q, problem.n_heads), _groups_as_rows(o, problem.n_heads)
        lse = None if lse is None else lse.view(problem.batch, problem.n_heads, problem.seq_len_q)
    launched = cuda.forward(choice.kernel, q, k, v, target, lse, scale, features)
    if o is not out:
        out.copy_(o[..., : out.shape[-1]])
    return Ran(choice.kernel, launched, workspace)


def _groups_as_rows(x: Tensor, n_heads_kv: int) -> Tensor:
    """One query (batch, 1, heads, d) as (batch, group, kv heads, d), by strides alone."""
    return x[:, 0].unflatten(1, (n_heads_kv, -1)).transpose(1, 2)


def _as_sequences(x: Tensor, batch: int, longest: int) -> Tensor:
    """Packed rows in the shape that a launch reads, (batch, longest, heads, d).

    The offsets say where each sequence begins, so that the stride between sequences does not count. Grid and
    workspaces need the most queries of a sequence; of keys any bound will do.
    """
    return x[None, :longest].expand(batch, -1, -1, -1)


def _fitted(x: Tensor, d_head: int) -> Tensor:
    if x.shape[-1] != d_head:
        return pad(x, (0, d_head - x.shape[-1]))
    if x.stride(-1) != 1 or misalignment(x):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def fill_without_keys(out: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
    """The result of queries that have no key at all."""
    out.zero_()
    if lse is None:
        return
    if sinks is None:
        lse.fill_(-math.inf)
    else:
        lse.copy_(sinks[None, :, None])
