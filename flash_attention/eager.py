"""The bodies of ``attention`` and ``attention_varlen``: checks, choice, launch; on real tensors, at once."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attention import attention_checks as checks
from flash_attention.choosing import choose, plan, problem_of
from flash_attention.problem import AttentionProblem, Window, visible_limits
from flash_attention.redirect import not_for_eager
from flash_attention.running import Cache, fill_without_keys, run_cpu, run_cuda
from flash_attention.select import Choice
from flash_attention.tma import stride_obstacle
from flash_helpers.configs.kernel import ForwardConfig, ForwardKernel

Result = Tensor | tuple[Tensor, Tensor]

_last_kernel: ForwardKernel | None = None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    window: Window,
    softcap: float,
    sinks: Tensor | None,
    return_lse: bool,
    out: Tensor | None,
    config: ForwardConfig | None,
    backend: str | None,
) -> Result | None:
    """``flash_attention.attention``; None: these tensors are not for eager work (``not_for_eager``)."""
    window, softcap = checks.checked_window(window), checks.checked_softcap(softcap)
    if (backend is not None or config is not None) and isinstance(q, Tensor):
        checks.check_choice(backend, config, q)
    planned = plan(q, k, v, sinks, bool(causal), window, softcap, return_lse, config)
    if planned is None:
        return None
    problem, choice = planned
    scale = checks.checked_scale(softmax_scale, problem.d_head)
    out = _output(out, (*q.shape[:3], v.shape[3]), q, k, v, sinks)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32) if return_lse else None
    if choice is not None:
        if not q.is_cuda:
            run_cpu(choice, problem, q, k, v, out, lse, scale, softcap, sinks)
        elif problem.seq_len_k:
            run_cuda(choice, problem, q, k, v, out, lse, scale, softcap, sinks)
        else:
            fill_without_keys(out, lse, sinks)
        _remember(choice)
    return out if lse is None else (out, lse)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    validate: bool,
    causal: bool,
    softmax_scale: float | None,
    window: Window,
    softcap: float,
    sinks: Tensor | None,
    return_lse: bool,
    out: Tensor | None,
    config: ForwardConfig | None,
    backend: str | None,
) -> Result | None:
    """``flash_attention.attention_varlen``; None: as for ``attention``."""
    if not_for_eager(q, k, v):
        return None
    window, softcap = checks.checked_window(window), checks.checked_softcap(softcap)
    checks.check_inputs(q, k, v, sinks, "(total, heads, d)")
    checks.check_choice(backend, config, q)
    scale = checks.checked_scale(softmax_scale, q.shape[2])
    checks.check_packing(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if validate or not q.is_cuda:
        checks.check_offset_values("cu_seqlens_q", cu_seqlens_q, q.shape[0], "max_seqlen_q", max_seqlen_q)
        checks.check_offset_values("cu_seqlens_k", cu_seqlens_k, k.shape[0], "max_seqlen_k", max_seqlen_k)
    out = _output(out, (*q.shape[:2], v.shape[2]), q, k, v, sinks)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if return_lse else None
    if out.numel():
        left, right = visible_limits(causal, window, max_seqlen_q, max_seqlen_k)
        problem = AttentionProblem(
            dtype=checks.DTYPES[q.dtype],
            batch=cu_seqlens_q.numel() - 1,
            seq_len_q=max_seqlen_q,
            seq_len_k=max_seqlen_k,
            n_heads=q.shape[1],
            n_heads_kv=k.shape[1],
            d_head=q.shape[2],
            d_head_v=v.shape[2],
            left=left,
            right=right,
            softcap=softcap > 0,
            sinks=sinks is not None,
            varlen=True,
            lse=return_lse,
            tma_obstacle=stride_obstacle(q=q, k=k, v=v),
        )
        choice = choose(problem, q.device, config)
        if q.is_cuda:
            offsets = (cu_seqlens_q, cu_seqlens_k)
            run_cuda(choice, problem, q, k, v, out, lse, scale, softcap, sinks, offsets)
        else:
            ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
            for i in range(problem.batch):
                queries, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
                one_lse = None if lse is None else lse[None, :, queries]
                one = (q[None, queries], k[None, keys], v[None, keys], out[None, queries], one_lse)
                run_cpu(choice, problem, *one, scale, softcap, sinks)
        _remember(choice)
    return out if lse is None else (out, lse)


def attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: Tensor,
    block_table: Tensor | None,
    causal: bool,
    softmax_scale: float | None,
    window: Window,
    softcap: float,
    sinks: Tensor | None,
    return_lse: bool,
    out: Tensor | None,
    config: ForwardConfig | None,
    backend: str | None,
) -> Result | None:
    """``flash_attention.cached.attention_cached``; None: as for ``attention``."""
    if not_for_eager(q, k, v):
        return None
    window, softcap = checks.checked_window(window), checks.checked_softcap(softcap)
    paged = block_table is not None
    checks.check_inputs(q, k, v, sinks, "(batch, seq, heads, d)", paged)
    checks.check_choice(backend, config, q)
    checks.check_seqused("seqused_k", seqused_k, q)
    capacity = k.shape[1]
    if block_table is not None:
        checks.check_block_table(block_table, q)
        capacity *= block_table.shape[1]
    scale = checks.checked_scale(softmax_scale, q.shape[3])
    out = _output(out, (*q.shape[:3], v.shape[3]), q, k, v, sinks)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32) if return_lse else None
    if out.numel() and not capacity:
        fill_without_keys(out, lse, sinks)
    elif out.numel():
        problem = problem_of(q, k, v, sinks, causal, window, softcap, return_lse, capacity, paged)
        choice = choose(problem, q.device, config)
        if q.is_cuda:
            cache = Cache(seqused_k, block_table)
            run_cuda(choice, problem, q, k, v, out, lse, scale, softcap, sinks, cache=cache)
        else:
            for i, n in enumerate(seqused_k.clamp(0, capacity).tolist()):
                one = slice(i, i + 1)
                keys, values = (_first_rows(x, i, n, block_table) for x in (k, v))
                one_lse = None if lse is None else lse[one]
                run_cpu(choice, problem, q[one], keys, values, out[one], one_lse, scale, softcap, sinks)
        _remember(choice)
    return out if lse is None else (out, lse)


def _first_rows(cache: Tensor, item: int, n: int, block_table: Tensor | None) -> Tensor:
    """The first n rows of a batch item, (1, n, heads, d)."""
    if block_table is None:
        return cache[item : item + 1, :n]
    pages = block_table[item, : -(-n // cache.shape[1])].long()
    return cache[pages].flatten(0, 1)[None, :n]


def last_kernel() -> ForwardKernel | None:
    """See ``flash_attention.last_kernel``."""
    return _last_kernel


def _remember(choice: Choice) -> None:
    global _last_kernel
    _last_kernel = choice.kernel


def _output(
    out: Tensor | None, shape: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> Tensor:
    if out is None:
        return q.new_empty(shape)
    inputs = {"q": q, "k": k, "v": v}
    checks.check_out(out, shape, inputs if sinks is None else {**inputs, "sinks": sinks})
    return out
