"""The bodies of ``attention`` and its like: checks, choice, launch; on real tensors, at once.

All take the call's tensors, its ``Options``, and the key by which the call is to be remembered
(``remembered``); None: it is not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attention.checks import calls as checks
from flash_attention.checks.options import checked_flag, checked_scale
from flash_attention.checks.tensors import check_memory
from flash_attention.checks.tma import stride_obstacle
from flash_attention.options import Options
from flash_attention.run import launch_cache
from flash_attention.run.choices import LAYOUT, choose, problem_of
from flash_attention.run.launch import Cache, Ran, fill_without_keys, run_cpu, run_cuda
from flash_attention.run.launch_cache import Key
from flash_attention.run.tracing import not_for_eager
from flash_helpers import generation
from flash_helpers.kernels.kernel import ForwardKernel
from flash_helpers.select.problem import AttentionProblem, visible_limits
from flash_helpers.select.select import Choice

Result = Tensor | tuple[Tensor, Tensor]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    key: Key | None = None,
) -> Result | None:
    """``flash_attention.attention``; None: these tensors are not for eager work (``not_for_eager``)."""
    if not_for_eager(q, k, v, options.sinks, options.out):
        return None
    options = options.checked(q)
    sinks, softcap = options.sinks, options.softcap
    checks.check_inputs(q, k, v, sinks, LAYOUT)
    inputs = {"q": q, "k": k, "v": v, "sinks": sinks}
    check_memory({**inputs, "out": options.out})
    problem = problem_of(q, k, v, sinks, options.causal, options.window, softcap, options.return_lse)
    chosen_in = generation.number()
    choice = choose(problem, q.device, options.config) if _has_rows(q) else None
    scale = checked_scale(options.softmax_scale, problem.d_head)
    out = _output(options, (*q.shape[:3], v.shape[3]), inputs)
    lse = _lse(options, q, (q.shape[0], q.shape[2], q.shape[1]))
    if choice is not None:
        if not q.is_cuda:
            launch_cache.set_last_kernel(run_cpu(choice, problem, q, k, v, out, lse, scale, softcap, sinks))
        elif problem.seq_len_k:
            ran = run_cuda(choice, problem, q, k, v, out, lse, scale, softcap, sinks)
            _remember(key, (q, k, v, options.out, sinks), options, ran, chosen_in, out, lse)
        else:
            fill_without_keys(out, lse, sinks)
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
    options: Options,
    key: Key | None = None,
) -> Result | None:
    """``flash_attention.attention_varlen``; None: as for ``attention``."""
    if not_for_eager(q, k, v, options.sinks, options.out, cu_seqlens_q, cu_seqlens_k):
        return None
    options = options.checked(q)
    sinks, softcap = options.sinks, options.softcap
    checks.check_inputs(q, k, v, sinks, "(total, heads, d)")
    scale = checked_scale(options.softmax_scale, q.shape[2])
    checks.check_packing(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    inputs = {"q": q, "k": k, "v": v, "sinks": sinks}
    inputs |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    check_memory({**inputs, "out": options.out})
    if checked_flag("validate", validate) or not q.is_cuda:
        checks.check_offset_values("cu_seqlens_q", cu_seqlens_q, q.shape[0], "max_seqlen_q", max_seqlen_q)
        checks.check_offset_values("cu_seqlens_k", cu_seqlens_k, k.shape[0], "max_seqlen_k", max_seqlen_k)
    out = _output(options, (*q.shape[:2], v.shape[2]), inputs)
    lse = _lse(options, q, (q.shape[1], q.shape[0]))
    batch = cu_seqlens_q.numel() - 1
    if not (batch and max_seqlen_q):
        fill_without_keys(out, lse, None)  # all rows lie behind the last offset
    elif out.numel():
        left, right = visible_limits(options.causal, options.window, max_seqlen_q, max_seqlen_k)
        problem = AttentionProblem(
            dtype=checks.DTYPES[q.dtype],
            batch=batch,
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
            lse=options.return_lse,
            tma_obstacle=stride_obstacle(q=q, k=k, v=v),
        )
        chosen_in = generation.number()
        choice = choose(problem, q.device, options.config)
        if q.is_cuda:
            offsets = (cu_seqlens_q, cu_seqlens_k)
            ran = run_cuda(choice, problem, q, k, v, out, lse, scale, softcap, sinks, offsets)
            given = (q, k, v, options.out, sinks, *offsets, None, None, max_seqlen_q, max_seqlen_k)
            _remember(key, given, options, ran, chosen_in, out, lse)
        else:
            ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
            kernels = []
            for i in range(problem.batch):
                queries, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
                one_lse = None if lse is None else lse[None, :, queries]
                one = (q[None, queries], k[None, keys], v[None, keys], out[None, queries], one_lse)
                kernels.append(run_cpu(choice, problem, *one, scale, softcap, sinks))
            fill_without_keys(out[ends_q[-1] :], None if lse is None else lse[:, ends_q[-1] :], None)
            _set_last_kernel(choice, kernels)
    return out if lse is None else (out, lse)


def attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: Tensor,
    block_table: Tensor | None,
    validate: bool,
    options: Options,
    key: Key | None = None,
) -> Result | None:
    """``flash_attention.cached.attention_cached``; None: as for ``attention``."""
    if not_for_eager(q, k, v, options.sinks, options.out, seqused_k, block_table):
        return None
    options = options.checked(q)
    sinks, softcap = options.sinks, options.softcap
    paged = block_table is not None
    checks.check_inputs(q, k, v, sinks, LAYOUT, paged)
    checks.check_seqused("seqused_k", seqused_k, q)
    validate = checked_flag("validate", validate)
    capacity = k.shape[1]
    if block_table is not None:
        checks.check_block_table(block_table, q)
    inputs = {"q": q, "k": k, "v": v, "sinks": sinks, "seqused_k": seqused_k, "block_table": block_table}
    check_memory({**inputs, "out": options.out})
    if validate or not q.is_cuda:
        checks.check_counts("seqused_k", seqused_k)
    if block_table is not None:
        if validate or not q.is_cuda:
            checks.check_pages(block_table, seqused_k, k)
        capacity *= block_table.shape[1] if k.shape[0] else 0
    scale = checked_scale(options.softmax_scale, q.shape[3])
    out = _output(options, (*q.shape[:3], v.shape[3]), inputs)
    lse = _lse(options, q, (q.shape[0], q.shape[2], q.shape[1]))
    if out.numel() and not capacity:
        fill_without_keys(out, lse, sinks)
    elif out.numel():
        causal, window, wants_lse = options.causal, options.window, options.return_lse
        problem = problem_of(q, k, v, sinks, causal, window, softcap, wants_lse, capacity, paged)
        chosen_in = generation.number()
        choice = choose(problem, q.device, options.config)
        if q.is_cuda:
            cache = Cache(seqused_k, block_table)
            ran = run_cuda(choice, problem, q, k, v, out, lse, scale, softcap, sinks, cache=cache)
            given = (q, k, v, options.out, sinks, None, None, seqused_k, block_table)
            _remember(key, given, options, ran, chosen_in, out, lse)
        else:
            kernels = []
            for i, n in enumerate(seqused_k.clamp(0, capacity).tolist()):
                one = slice(i, i + 1)
                keys, values = (_first_rows(x, i, n, block_table) for x in (k, v))
                one_lse = None if lse is None else lse[one]
                one_q, one_out = q[one], out[one]
                kernels.append(
                    run_cpu(choice, problem, one_q, keys, values, one_out, one_lse, scale, softcap, sinks)
                )
            _set_last_kernel(choice, kernels)
    return out if lse is None else (out, lse)


def _first_rows(cache: Tensor, item: int, n: int, block_table: Tensor | None) -> Tensor:
    """The first n rows of a batch item, (1, n, heads, d)."""
    if block_table is None:
        return cache[item : item + 1, :n]
    pages = block_table[item, : -(-n // cache.shape[1])].long()
    return cache[pages].flatten(0, 1)[None, :n]


def _has_rows(q: Tensor) -> bool:
    """Whether there is a query, of any size: what has none needs no kernel."""
    return q.shape[0] * q.shape[1] * q.shape[2] > 0


def _output(options: Options, shape: tuple[int, ...], inputs: dict[str, Tensor | None]) -> Tensor:
    """The caller's output, apart from every input, or a new one."""
    tensors = {name: x for name, x in inputs.items() if x is not None}
    if options.out is None:
        return tensors["q"].new_empty(shape)
    checks.check_out(options.out, shape, tensors)
    return options.out


def _lse(options: Options, q: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    return q.new_empty(shape, dtype=torch.float32) if options.return_lse else None


def _set_last_kernel(choice: Choice, kernels: list[ForwardKernel]) -> None:
    """Of a CPU call that computes one item after the other: the chosen one, if it has run for any item."""
    if kernels:
        launch_cache.set_last_kernel(choice.kernel if choice.kernel in kernels else kernels[0])


def _remember(
    key: Key | None,
    given: tuple[object, ...],
    options: Options,
    ran: Ran,
    chosen_in: int,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    launch_cache.set_last_kernel(ran.kernel)
    if key is not None:
        made = (out if options.out is None else None, lse, ran.workspace)
        launch_cache.remember(key, given, options.config, ran.kernel, ran.launched, made, chosen_in)
