"""flash-attn 3's function of one tensor that holds queries, keys and values."""

from __future__ import annotations

from torch import Tensor

from flash_attention.checks.keywords import named_keywords
from flash_attention.checks.options import given
from flash_attention.checks.tensors import check_tensors
from flash_attention.compat.flash_attn_3 import flash_attn_func
from flash_attention.compat.padding import Result
from flash_attention.compat.unpacked import unpacked
from flash_attention.compat.words import in_words


@named_keywords
@in_words(q="qkv", k="qkv", v="qkv")
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_func`` with queries, keys and values in one tensor, of which nothing is copied.

    Args:
        qkv: (batch, seq_len, 3, n_heads, d_head), float16 or bfloat16; or with ``num_heads_q`` (batch,
            seq_len, num_heads_q + 2 * n_heads_kv, d_head), heads of queries, then of keys, then of values.
        num_heads_q: how many heads of qkv are queries; None where it has five dimensions.
        softmax_scale and the others: as in ``flash_attn_func``.

    Returns:
        as ``flash_attn_func``.

    Raises:
        TypeError, ValueError: qkv is no tensor of such a shape, or has not so many heads.
        and what ``flash_attn_func`` raises.
    """
    check_tensors({"qkv": qkv})
    if qkv.ndim == 4:
        q, k, v = qkv.split(_heads_of(qkv, num_heads_q), dim=-2)
    else:
        q, k, v = unpacked("qkv", qkv, ("batch", "seq_len", "3", "n_heads", "d_head"))
        if num_heads_q is not None and num_heads_q != q.shape[-2]:
            raise ValueError(
                f"num_heads_q is {given(num_heads_q)}, and qkv {tuple(qkv.shape)} has {q.shape[-2]} heads of "
                "queries: pass None"
            )
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk,
        softcap, deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def _heads_of(qkv: Tensor, num_heads_q: int | None) -> list[int]:
    """How many heads of qkv (batch, seq_len, heads, d_head) are queries, keys and values."""
    heads = qkv.shape[-2]
    if type(num_heads_q) is not int:
        raise TypeError(
            f"num_heads_q is {given(num_heads_q)}; beside qkv {tuple(qkv.shape)} it must be an int: how many "
            f"of the {heads} heads are queries. Or stack qkv as (batch, seq_len, 3, n_heads, d_head)"
        )
    if not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
        raise ValueError(
            f"num_heads_q is {num_heads_q}, and qkv {tuple(qkv.shape)} has {heads} heads; it must leave an "
            "even number of them, at least 2: as many of keys as of values"
        )
    n_heads_kv = (heads - num_heads_q) // 2
    return [num_heads_q, n_heads_kv, n_heads_kv]
