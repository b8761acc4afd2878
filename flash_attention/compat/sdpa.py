"""PyTorch's ``scaled_dot_product_attention`` by this library: its signature, layout and causal alignment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attention.attention import attention
from flash_attention.checks.options import checked_flag, refuse
from flash_attention.checks.tensors import check_tensors
from flash_helpers.select.problem import Window

IMPLEMENTATION = "flash_attention_kernels"


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` for 16-bit tensors without a mask.

    Args:
        query: (…, n_heads, seq_len_q, d_head), float16 or bfloat16; also without heads, (seq_len_q, d_head).
        key: (…, n_heads_kv, seq_len_k, d_head).
        value: (…, n_heads_kv, seq_len_k, d_head_v).
        is_causal: key j is visible to query i when j <= i: aligned top-left, unlike ``attention``.
        scale: factor of the scores; None: d_head ** -0.5.
        enable_gqa: query heads may be a multiple of the heads of key and value.

    Returns:
        (…, n_heads, seq_len_q, d_head_v), a view of a contiguous (batch, seq_len_q, n_heads, d_head_v).

    Raises:
        NotImplementedError: attn_mask, dropout_p, an input that requires grad.
        ValueError, TypeError: what ``attention`` raises; head counts that differ without enable_gqa.
    """
    if attn_mask is not None:
        raise NotImplementedError(
            "attn_mask is a tensor; the kernels take no mask tensor: pass is_causal=True, or call "
            "flash_attention.attention(window=…), or attention_varlen for padded batches"
        )
    refuse(dropout_p=dropout_p)
    check_tensors({"query": query, "key": key, "value": value})
    if not query.ndim == key.ndim == value.ndim or query.ndim < 2:
        raise ValueError(
            f"query, key and value must be (…, n_heads, seq, d); given {tuple(query.shape)}, "
            f"{tuple(key.shape)} and {tuple(value.shape)}"
        )
    leading = query.shape[:-3]
    if not leading == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            "query, key and value must agree in all dimensions before n_heads; given "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}: use key.expand(…) to share "
            "keys"
        )
    q, k, v = _heads_second(query), _heads_second(key), _heads_second(value)
    if not checked_flag("enable_gqa", enable_gqa) and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"query has {q.shape[2]} heads, key {k.shape[2]}; heads are shared only with enable_gqa=True"
        )
    k, v, window = _top_left(q, k, v, is_causal)
    result = attention(q, k, v, softmax_scale=scale, window=window)
    assert isinstance(result, Tensor)  # without return_lse
    out = result.transpose(1, 2)
    return out.reshape(*leading, *out.shape[1:]) if query.ndim >= 3 else out[0, 0]


def _top_left(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor, Window]:
    """k, v and the window with which ``attention`` shows key j to query i when j <= i, if ``is_causal``."""
    seq_len_q, seq_len_k = q.shape[1], k.shape[1]
    if not checked_flag("is_causal", is_causal):
        return k, v, (None, None)
    if seq_len_q > seq_len_k:
        return k, v, (None, seq_len_q - seq_len_k)  # the last query's place is the last key
    return k[:, :seq_len_q], v[:, :seq_len_q], (None, 0)  # no query sees further


def _heads_second(x: Tensor) -> Tensor:
    """(…, n_heads, seq, d) as (batch, seq, n_heads, d)."""
    if x.ndim == 4:
        return x.transpose(1, 2)
    if x.ndim == 2:
        return x[None, :, None]
    return (x[None] if x.ndim == 3 else x.flatten(0, -4)).transpose(1, 2)


def register_with_torch() -> bool:
    """Offers the library to PyTorch under the name ``flash_attention_kernels``.

    After ``torch.nn.attention.activate_flash_attention_impl`` with that name, PyTorch's own attention runs
    this library where it would run its flash attention on CUDA, forward only.

    Returns:
        False where this torch has no such registry (before 2.11).
    """
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        return False
    register(IMPLEMENTATION, register_fn=_Activated)
    return True


class _Activated:
    """PyTorch's flash attention operator on CUDA, replaced until ``remove`` is called."""

    def __init__(self) -> None:
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL", "CUDA")
        self.library.impl("_scaled_dot_product_flash_attention", flash_attention_operator, "CUDA")

    def remove(self) -> None:
        self.library = None


def flash_attention_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_flash_attention``: (batch, n_heads, seq, d) in, nine results out.

    Raises:
        NotImplementedError: dropout_p, return_debug_mask; what ``attention`` raises.
    """
    refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    seq_len_q, seq_len_k = q.shape[1], k.shape[1]
    k, v, window = _top_left(q, k, v, is_causal)
    out = torch.empty_like(query)  # PyTorch's shape inference expects the strides of query
    _, lse = attention(q, k, v, softmax_scale=scale, window=window, return_lse=True, out=out.transpose(1, 2))
    no_random_state = torch.empty(0, dtype=torch.int64, device="meta")
    return (
        out, lse, None, None, seq_len_q, seq_len_k, no_random_state, no_random_state,
        query.new_empty(0),
    )  # fmt: skip
