"""Attention with a kernel chosen by the library: any lengths, head groups, masks. See docs/contract.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from flash_attention.call import shifted
from flash_attention.checks.keywords import parameters, unknown_keyword
from flash_attention.checks.options import (
    checked_dropout,
    checked_factors,
    checked_numerics,
    checked_sms,
    checked_splits,
    checked_window,
)
from flash_attention.layouts import DENSE, Packed, PackedCached
from flash_attention.options import NO_DROPOUT, NO_OFFSET, NO_SOFTCAP, Keywords, MaskMod, Options, ScoreMod
from flash_attention.run import eager, launch_cache, torch_ops
from flash_attention.run.eager import Result
from flash_attention.run.launch_cache import Key
from flash_attention.run.tracing import traced
from flash_helpers.kernels.kernel import BackwardConfig, ForwardConfig, Kernel
from flash_helpers.kernels.problem import UNLIMITED, Window

if TYPE_CHECKING:
    from typing_extensions import Never, Unpack


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[Keywords],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[Keywords],
) -> Result: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window = UNLIMITED,
    softcap: float = NO_SOFTCAP,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    config: ForwardConfig | None = None,
    backend: str | None = None,
    diagonal_offset: int = NO_OFFSET,
    out_dtype: torch.dtype | None = None,
    n_sms: int | None = None,
    deterministic: bool = False,
    backward_config: BackwardConfig | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    dropout_p: float = NO_DROPOUT,
    dropout_seed: Tensor | None = None,
    numerics: str | None = None,
    **unknown: Never,
) -> Result:
    """Scaled dot-product attention on the device of the tensors.

    Args:
        q: (batch, seq_len_q, n_heads, d_head), float16 or bfloat16; any strides.
        k: (batch, seq_len_k, n_heads_kv, d_head); n_heads is a multiple of n_heads_kv, and query head h
            reads kv head h // (n_heads // n_heads_kv).
        v: (batch, seq_len_k, n_heads_kv, d_head_v).
        causal: key j is visible to query i when j <= p, where p is the query's own place among the keys,
            i + seq_len_k - seq_len_q + diagonal_offset.
        softmax_scale: factor of the scores; None: d_head ** -0.5; 0.0 is zero.
        window: (left, right), of either sign: key j is visible to query i when p - left <= j <= p + right;
            None: no limit.
        softcap: logits become softcap * tanh(logit / softcap); 0.0: they stay.
        sinks: (n_heads,), float32 or like q: one more logit a head, which takes its share of the softmax
            and has no value.
        return_lse: also return the natural logarithm of each query's softmax denominator.
        out: (batch, seq_len_q, n_heads, d_head_v), of the output's type; written and returned. It must not
            overlap an input.
        config: the configuration to run; None: the library chooses.
        backend: ``cuda`` or ``cpu``, which must be where the tensors are; None: there.
        diagonal_offset: by so many keys every query's own place moves, of either sign. With 0 the last query
            stands at the last key; where the given keys end n keys before its place, pass n.
        out_dtype: torch.float32: the output is float32 and is not rounded, as ``merge`` wants parts of the
            keys; None: the type of q.
        n_sms: how many of the GPU's SMs the call may use, so that others are left for what runs beside it;
            None, or as many as there are: all. Kernels of the Hopper family keep to it; CPUs are not asked.
        deterministic: equal calls give equal gradients, too. ``torch.use_deterministic_algorithms(True)`` at
            the time of the backward pass asks for the same.
        backward_config: the configuration that computes the gradients of q, k and v, where they are wanted;
            None: the library chooses.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, a function that gives the new score of a scaled
            and soft-capped one; -inf hides the key. It is called once, with symbols (docs/mods.md), and
            becomes a part of the kernel. Tensors that it captures get gradients. None: scores stay.
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)``, whether the query sees the key, beside ``causal`` and
            ``window``; likewise. Or a ``BlockMask`` of PyTorch, made for these lengths.
        dropout_p: the probability that a weight is dropped behind the softmax; those that stay are divided by
            1 - dropout_p. The LSE is that of the softmax. 0.0: none is.
        dropout_seed: () int64 on the device of q: which weights are dropped. None: drawn from PyTorch's
            generator of that device, so that ``torch.manual_seed`` repeats it.
        numerics: ``invariant``: a query's output and LSE have the same bits in a whole prompt, in chunks of
            it, decoded, beside others, packed, from a cache or from pages. None, or ``fast``: whatever kernel
            is the fastest.

    Returns:
        out, contiguous if it is new; with ``return_lse`` also lse (batch, n_heads, seq_len_q), float32. A
        query that sees no key has out 0 and lse -inf (or the sink). PyTorch differentiates both, once.

    Raises:
        TypeError, ValueError, NotImplementedError: a bad argument; the message says what is allowed.
        NoKernelError: no kernel for CUDA tensors has a feature or a head size; CPU tensors take all.
        ModError: ``score_mod`` or ``mask_mod`` cannot be recorded; the message has its line.
        InfeasibleConfigError: ``config`` or ``backward_config`` cannot compute this.

    Arrays of other libraries that have ``__dlpack__`` are taken in place of tensors; the results are then of
    q's library. Under autocast, inputs that are not of one 16-bit type are converted to autocast's.
    """
    if unknown:
        raise unknown_keyword("attention", unknown, parameters(attention))
    if diagonal_offset is not NO_OFFSET:
        causal, window = shifted(causal, window, diagonal_offset)
    if dropout_p is not NO_DROPOUT:
        dropout_p = checked_dropout(dropout_p)
    at_once = not traced()
    key: Key | None = None
    mods: launch_cache.Mods | None = launch_cache.NO_MODS
    if at_once and (score_mod is not None or mask_mod is not None):
        mods = launch_cache.mods_of(score_mod, mask_mod)
    if numerics is not None:
        numerics = checked_numerics(numerics)
    if at_once and mods is not None and not dropout_p:
        if window is not UNLIMITED:
            window = checked_window(window)
        if (softcap is not NO_SOFTCAP or softmax_scale is not None) and not (
            type(softcap) is float and (softmax_scale is None or type(softmax_scale) is float)
        ):
            softmax_scale, softcap = checked_factors(softmax_scale, softcap)
        key = ("attention", causal, softmax_scale, window, softcap, return_lse)
        plain = config is None and backend is None and out_dtype is None and backward_config is None
        if not (plain and n_sms is None and numerics is None and deterministic is False):
            n_sms = checked_sms(n_sms)
            key += (None if config is None else id(config), backend, out_dtype, n_sms, deterministic)
            key += (None if backward_config is None else id(backward_config), numerics)
        if mods is launch_cache.NO_MODS:
            result = launch_cache.repeat(key, q, k, v, out, sinks)
        else:
            key += mods[0]
            result = launch_cache.repeat(key, q, k, v, out, sinks, *launch_cache.NO_LAYOUT, *mods[1])
        if result is not None:
            return result
    rare = out_dtype, n_sms, deterministic, backward_config, score_mod, mask_mod, dropout_p, dropout_seed
    basic = causal, softmax_scale, window, softcap, sinks, return_lse, out, config, backend
    options = Options(*basic, *rare, numerics)
    if at_once:
        result = eager.attend(q, k, v, DENSE, options, key, mods)
        if result is not None:
            return result
    return torch_ops.call(q, k, v, DENSE, options)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    validate: bool = ...,
    seqused_q: Tensor | None = ...,
    seqused_k: Tensor | None = ...,
    block_table: Tensor | None = ...,
    n_splits: int | None = ...,
    **options: Unpack[Keywords],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    validate: bool = ...,
    seqused_q: Tensor | None = ...,
    seqused_k: Tensor | None = ...,
    block_table: Tensor | None = ...,
    n_splits: int | None = ...,
    **options: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    validate: bool = ...,
    seqused_q: Tensor | None = ...,
    seqused_k: Tensor | None = ...,
    block_table: Tensor | None = ...,
    n_splits: int | None = ...,
    **options: Unpack[Keywords],
) -> Result: ...


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window = UNLIMITED,
    softcap: float = NO_SOFTCAP,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    config: ForwardConfig | None = None,
    backend: str | None = None,
    diagonal_offset: int = NO_OFFSET,
    out_dtype: torch.dtype | None = None,
    n_sms: int | None = None,
    deterministic: bool = False,
    backward_config: BackwardConfig | None = None,
    validate: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    dropout_p: float = NO_DROPOUT,
    dropout_seed: Tensor | None = None,
    numerics: str | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    n_splits: int | None = None,
    **unknown: Never,
) -> Result:
    """Attention within each of several sequences that are packed one behind the other.

    Each sequence is computed as ``attention`` computes it alone; masks are aligned within the sequence.
    Prompts, chunks of prompts, decoding and the verification of drafts over a cache of keys are one call:
    a sequence has as many queries as its offsets say, and as many keys as ``seqused_k`` says. These numbers
    stay on the device, where the work is divided, so that one CUDA graph serves all lengths.

    Args:
        q: (total_q, n_heads, d_head).
        k: (total_k, n_heads_kv, d_head); without ``cu_seqlens_k`` (batch, capacity, n_heads_kv, d_head), with
            ``block_table`` (n_pages, page_size, n_heads_kv, d_head).
        v: (total_k, n_heads_kv, d_head_v), or as k.
        cu_seqlens_q: (batch + 1,) int32 on the device of q: 0, then the end of each sequence in q. Rows
            behind the last end are padding: their output is 0, their LSE -inf.
        cu_seqlens_k: likewise in k and v; None: keys are a cache, and ``seqused_k`` says how many count.
        max_seqlen_q: the most queries of one sequence.
        max_seqlen_k: the most keys of one sequence.
        validate: read the offsets and refuse wrong ones, which waits for the device. On the CPU they are
            always read.
        causal, softmax_scale, window, softcap, sinks, out, config, backend, diagonal_offset, out_dtype,
            n_sms, deterministic, backward_config, dropout_p, dropout_seed, numerics: as in ``attention``.
        score_mod, mask_mod: as in ``attention``; b is the number of the sequence, and places count within
            it.
        seqused_q: (batch,) int32 on the device of q: of a sequence's queries only the first so many count.
            The others are padding, as the rows behind the last end. None: all.
        seqused_k: (batch,) int32 on the device of q: of a sequence's keys only the first so many count;
            more than there is room for are cut down to it. None: all.
        block_table: (batch, max_pages) int32 on the device of q: key j of sequence b is row
            ``j % page_size`` of page ``block_table[b, j // page_size]``. See ``attention_cached``.
        n_splits: parts that the keys of each sequence are cut into, 1 … 256; None: the device finds the
            number for each, by its lengths. It is visible in time, and in rounding, alone.

    With one of the last four a call has no gradient.

    Returns:
        out (total_q, n_heads, d_head_v); with ``return_lse`` also lse (n_heads, total_q), float32.

    Raises:
        as ``attention``.
    """
    if unknown:
        raise unknown_keyword("attention_varlen", unknown, parameters(attention_varlen))
    if diagonal_offset is not NO_OFFSET:
        causal, window = shifted(causal, window, diagonal_offset)
    if dropout_p is not NO_DROPOUT:
        dropout_p = checked_dropout(dropout_p)
    at_once = not traced()
    key: Key | None = None
    mods: launch_cache.Mods | None = launch_cache.NO_MODS
    if at_once and (score_mod is not None or mask_mod is not None):
        mods = launch_cache.mods_of(score_mod, mask_mod)
    if numerics is not None:
        numerics = checked_numerics(numerics)
    if at_once and mods is not None and not dropout_p:
        if window is not UNLIMITED:
            window = checked_window(window)
        if (softcap is not NO_SOFTCAP or softmax_scale is not None) and not (
            type(softcap) is float and (softmax_scale is None or type(softmax_scale) is float)
        ):
            softmax_scale, softcap = checked_factors(softmax_scale, softcap)
        if validate is False:
            key = ("attention_varlen", causal, softmax_scale, window, softcap, return_lse)
            plain = config is None and backend is None and out_dtype is None and backward_config is None
            if not (plain and n_sms is None and numerics is None and deterministic is False):
                n_sms = checked_sms(n_sms)
                key += (None if config is None else id(config), backend, out_dtype, n_sms, deterministic)
                key += (None if backward_config is None else id(backward_config), numerics)
            if n_splits is not None:
                key += (checked_splits(n_splits),)
            key += mods[0]
            rows = cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, seqused_q
            result = launch_cache.repeat(
                key, q, k, v, out, sinks, *rows, max_seqlen_q, max_seqlen_k, *mods[1]
            )
            if result is not None:
                return result
    rare = out_dtype, n_sms, deterministic, backward_config, score_mod, mask_mod, dropout_p, dropout_seed
    basic = causal, softmax_scale, window, softcap, sinks, return_lse, out, config, backend
    options = Options(*basic, *rare, numerics)
    layout: Packed | PackedCached
    if cu_seqlens_k is not None and seqused_q is seqused_k is block_table is n_splits is None:
        layout = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, validate)
    else:
        counts = seqused_q, seqused_k, block_table
        longest = max_seqlen_q, max_seqlen_k
        layout = PackedCached(cu_seqlens_q, cu_seqlens_k, *counts, *longest, n_splits, validate)
    if at_once:
        result = eager.attend(q, k, v, layout, options, key, mods)
        if result is not None:
            return result
    return torch_ops.call(q, k, v, layout, options)


def last_kernel() -> Kernel | None:
    """What the latest call of ``attention`` and its variants in this process ran, whatever its thread.

    None: none has run yet. A call that needs no kernel, as one without keys, leaves it. On the CPU it is the
    kernel whose steps the CPU backend took, or ``PyTorchAttention`` where PyTorch's own attention ran.
    """
    return launch_cache.last_kernel()
