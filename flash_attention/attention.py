"""Attention with a kernel chosen by the library: any lengths, head groups, masks. See docs/contract.md."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attention import attention_checks as checks
from flash_attention.choosing import choose, plan
from flash_attention.problem import AttentionProblem, Window, visible_limits
from flash_attention.running import fill_without_keys, run_cpu, run_cuda
from flash_attention.select import Choice
from flash_attention.tma import stride_obstacle
from flash_helpers.configs.kernel import ForwardConfig, ForwardKernel

_last_kernel: ForwardKernel | None = None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    config: ForwardConfig | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention on the device of the tensors.

    Args:
        q: (batch, seq_len_q, n_heads, d_head), float16 or bfloat16; any strides.
        k: (batch, seq_len_k, n_heads_kv, d_head); n_heads is a multiple of n_heads_kv, and query head h
            reads kv head h // (n_heads // n_heads_kv).
        v: (batch, seq_len_k, n_heads_kv, d_head_v).
        causal: key j is visible to query i when j <= i + seq_len_k - seq_len_q.
        softmax_scale: factor of the scores; None: d_head ** -0.5; 0.0 is zero.
        window: (left, right): key j is visible to query i when
            i + seq_len_k - seq_len_q - left <= j <= i + seq_len_k - seq_len_q + right; None: no limit.
        softcap: logits become softcap * tanh(logit / softcap); 0.0: they stay.
        sinks: (n_heads,), float32 or like q: one more logit a head, which takes its share of the softmax
            and has no value.
        return_lse: also return the natural logarithm of each query's softmax denominator.
        out: (batch, seq_len_q, n_heads, d_head_v); written and returned. It must not overlap an input.
        config: the configuration to run; None: the library chooses.
        backend: ``cuda`` or ``cpu``, which must be where the tensors are; None: there.

    Returns:
        out, contiguous if it is new; with ``return_lse`` also lse (batch, n_heads, seq_len_q), float32. A
        query that sees no key has out 0 and lse -inf (or the sink).

    Raises:
        TypeError, ValueError, NotImplementedError: a bad argument; the message says what is allowed.
        NoKernelError: no kernel for CUDA tensors has a feature or a head size; CPU tensors take all.
        InfeasibleConfigError: ``config`` cannot compute this.
    """
    window, softcap = checks.checked_window(window), checks.checked_softcap(softcap)
    if backend is not None or config is not None:
        checks.check_choice(backend, config, q)
    problem, choice = plan(q, k, v, sinks, bool(causal), window, softcap, return_lse, config)
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
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    config: ForwardConfig | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of several sequences that are packed one behind the other.

    Each sequence is computed as ``attention`` computes it alone; masks are aligned within the sequence.

    Args:
        q: (total_q, n_heads, d_head).
        k: (total_k, n_heads_kv, d_head).
        v: (total_k, n_heads_kv, d_head_v).
        cu_seqlens_q: (batch + 1,) int32 on the device of q: 0, then the end of each sequence in q.
        cu_seqlens_k: likewise in k and v.
        max_seqlen_q: the most queries of one sequence.
        max_seqlen_k: the most keys of one sequence.
        validate: read the offsets and refuse wrong ones, which waits for the device. On the CPU they are
            always read.
        causal, softmax_scale, window, softcap, sinks, out, config, backend: as in ``attention``.

    Returns:
        out (total_q, n_heads, d_head_v); with ``return_lse`` also lse (n_heads, total_q), float32.

    Raises:
        as ``attention``.
    """
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


def last_kernel() -> ForwardKernel | None:
    """The kernel that the latest ``attention`` or ``attention_varlen`` ran; None: there was none."""
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
