"""Attention with a kernel chosen by the library: any lengths, head groups, masks. See docs/contract.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from flash_attention.call import DENSE, Packed
from flash_attention.checks.keywords import parameters, unknown_keyword
from flash_attention.checks.options import checked_factors, checked_window
from flash_attention.options import Keywords, Options
from flash_attention.run import eager, launch_cache, torch_ops
from flash_attention.run.eager import Result
from flash_attention.run.tracing import traced
from flash_helpers.kernels.kernel import ForwardConfig, Kernel
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
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    config: ForwardConfig | None = None,
    backend: str | None = None,
    deterministic: bool = False,
    **unknown: Never,
) -> Result:
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
        deterministic: equal calls give equal gradients, too. ``torch.use_deterministic_algorithms(True)`` at
            the time of the backward pass asks for the same.

    Returns:
        out, contiguous if it is new; with ``return_lse`` also lse (batch, n_heads, seq_len_q), float32. A
        query that sees no key has out 0 and lse -inf (or the sink). PyTorch differentiates both, once.

    Raises:
        TypeError, ValueError, NotImplementedError: a bad argument; the message says what is allowed.
        NoKernelError: no kernel for CUDA tensors has a feature or a head size; CPU tensors take all.
        InfeasibleConfigError: ``config`` cannot compute this.

    Arrays of other libraries that have ``__dlpack__`` are taken in place of tensors; the results are then of
    q's library. Under autocast, inputs that are not of one 16-bit type are converted to autocast's.
    """
    if unknown:
        raise unknown_keyword("attention", unknown, parameters(attention))
    at_once = not traced()
    key = None
    if at_once:
        if window is not UNLIMITED:
            window = checked_window(window)
        if type(softcap) is not float or not (softmax_scale is None or type(softmax_scale) is float):
            softmax_scale, softcap = checked_factors(softmax_scale, softcap)
        key = (
            "attention",
            causal,
            softmax_scale,
            window,
            softcap,
            return_lse,
            None if config is None else id(config),
            backend,
            deterministic,
        )
        result = launch_cache.repeat(key, q, k, v, out, sinks)
        if result is not None:
            return result
    options = Options(
        causal, softmax_scale, window, softcap, sinks, return_lse, out, config, backend, deterministic
    )
    if at_once:
        result = eager.attend(q, k, v, DENSE, options, key)
        if result is not None:
            return result
    return torch_ops.call(q, k, v, DENSE, options)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    validate: bool = ...,
    **options: Unpack[Keywords],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    validate: bool = ...,
    **options: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    validate: bool = ...,
    **options: Unpack[Keywords],
) -> Result: ...


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
    window: Window = UNLIMITED,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    config: ForwardConfig | None = None,
    backend: str | None = None,
    deterministic: bool = False,
    validate: bool = False,
    **unknown: Never,
) -> Result:
    """Attention within each of several sequences that are packed one behind the other.

    Each sequence is computed as ``attention`` computes it alone; masks are aligned within the sequence.

    Args:
        q: (total_q, n_heads, d_head).
        k: (total_k, n_heads_kv, d_head).
        v: (total_k, n_heads_kv, d_head_v).
        cu_seqlens_q: (batch + 1,) int32 on the device of q: 0, then the end of each sequence in q. Rows
            behind the last end are padding: their output is 0, their LSE -inf.
        cu_seqlens_k: likewise in k and v.
        max_seqlen_q: the most queries of one sequence.
        max_seqlen_k: the most keys of one sequence.
        validate: read the offsets and refuse wrong ones, which waits for the device. On the CPU they are
            always read.
        causal, softmax_scale, window, softcap, sinks, out, config, backend, deterministic: as in
            ``attention``.

    Returns:
        out (total_q, n_heads, d_head_v); with ``return_lse`` also lse (n_heads, total_q), float32.

    Raises:
        as ``attention``.
    """
    if unknown:
        raise unknown_keyword("attention_varlen", unknown, parameters(attention_varlen))
    at_once = not traced()
    key = None
    if at_once:
        if window is not UNLIMITED:
            window = checked_window(window)
        if type(softcap) is not float or not (softmax_scale is None or type(softmax_scale) is float):
            softmax_scale, softcap = checked_factors(softmax_scale, softcap)
        if not validate:
            key = (
                "attention_varlen",
                causal,
                softmax_scale,
                window,
                softcap,
                return_lse,
                None if config is None else id(config),
                backend,
                deterministic,
            )
            packing = (cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, max_seqlen_k)
            result = launch_cache.repeat(key, q, k, v, out, sinks, *packing)
            if result is not None:
                return result
    options = Options(
        causal, softmax_scale, window, softcap, sinks, return_lse, out, config, backend, deterministic
    )
    layout = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, validate)
    if at_once:
        result = eager.attend(q, k, v, layout, options, key)
        if result is not None:
            return result
    return torch_ops.call(q, k, v, layout, options)


def last_kernel() -> Kernel | None:
    """What the latest call of ``attention`` and its variants in this process ran, whatever its thread.

    None: none has run yet. A call that needs no kernel, as one without keys, leaves it. On the CPU it is the
    kernel whose steps the CPU backend took, or ``PyTorchAttention`` where PyTorch's own attention ran.
    """
    return launch_cache.last_kernel()
