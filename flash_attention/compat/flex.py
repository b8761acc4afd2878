"""PyTorch's ``flex_attention`` by this library: its signature, layout and meaning, without a compiled caller.

What this library does not do is refused with ``NotImplementedError`` naming the argument, never ignored.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_attention.attention import attention
from flash_attention.checks.keywords import named_keywords
from flash_attention.checks.options import checked_flag, checked_scale, given
from flash_attention.compat.sdpa import check_heads_first
from flash_attention.compat.words import in_words
from flash_attention.mods.block_mask import is_block_mask
from flash_attention.options import ScoreMod


@named_keywords
@in_words(q="query", k="key", v="value", softmax_scale="scale", mask_mod="block_mask")
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """``torch.nn.attention.flex_attention.flex_attention`` for 16-bit tensors.

    Args:
        query: (batch, n_heads, seq_len_q, d_head), float16 or bfloat16.
        key: (batch, n_heads_kv, seq_len_k, d_head); of 1 in place of batch for all items.
        value: (batch, n_heads_kv, seq_len_k, d_head_v), likewise.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, recorded as ``attention`` does (docs/mods.md).
        block_mask: a ``BlockMask`` for these lengths, or a function ``mask_mod(b, h, q_idx, kv_idx)``, which
            needs no lists. Of a ``BlockMask``, ``mask_mod`` alone is used where it is found to say what the
            lists say; else the lists, too.
        scale: factor of the scores; None: d_head ** -0.5.
        enable_gqa: query heads may be a multiple of the heads of key and value.
        return_lse: also return the log-sum-exp.
        kernel_options: None: the library chooses how its kernels run.
        return_aux: ``AuxRequest(lse=True)``: return (out, ``AuxOutput``); None: no.

    Returns:
        out (batch, n_heads, seq_len_q, d_head_v), a view of a contiguous (batch, seq_len_q, n_heads,
        d_head_v); with ``return_lse`` (out, lse (batch, n_heads, seq_len_q) float32). A query that sees no
        key has 0 and -inf, also where a score of -inf hides it.

    Raises:
        NotImplementedError: kernel_options; max_scores of return_aux.
        and what ``attention`` raises.
    """
    if kernel_options:
        raise NotImplementedError(
            f"kernel_options is {given(kernel_options)}; they are of PyTorch's kernels, and this library "
            "chooses how its own run: pass None"
        )
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise TypeError(
            f"return_aux is {given(return_aux)}; it must be an AuxRequest of torch.nn.attention."
            "flex_attention, such as AuxRequest(lse=True), or None"
        )
    if return_aux is not None and getattr(return_aux, "max_scores", False):
        raise NotImplementedError(
            "return_aux asks for max_scores; kernels keep no largest score: ask for lse alone, "
            "AuxRequest(lse=True)"
        )
    if return_aux is not None and checked_flag("return_lse", return_lse):
        raise ValueError("return_lse is True, and return_aux is given: pass return_aux alone")
    if not all(isinstance(x, Tensor) and x.ndim == 4 for x in (query, key, value)):
        shapes = ", ".join(
            str(tuple(x.shape)) if isinstance(x, Tensor) else given(x) for x in (query, key, value)
        )
        raise ValueError(f"query, key and value must be tensors (batch, n_heads, seq, d); given {shapes}")
    if not (block_mask is None or callable(block_mask) or is_block_mask(block_mask)):
        raise TypeError(
            f"block_mask is {given(block_mask)}; it must be a BlockMask of torch.nn.attention."
            "flex_attention, a function mask_mod(b, h, q_idx, kv_idx), or None. Of a whole tensor of bools "
            "flash_attention.mods.dense_mask(mask) makes one"
        )
    if key.shape[0] == value.shape[0] == 1 < query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    check_heads_first(query, key, value, checked_flag("enable_gqa", enable_gqa))
    wants_lse = checked_flag("return_lse", return_lse) or bool(getattr(return_aux, "lse", False))
    result: Any = attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        softmax_scale=None if scale is None else checked_scale(scale, query.shape[-1], "scale"),
        return_lse=wants_lse,
        score_mod=score_mod,
        mask_mod=block_mask,
    )
    out, lse = result if wants_lse else (result, None)
    out = out.transpose(1, 2)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import (
            AuxOutput,
        )  # return_aux is of this module, so it is there

        return out, AuxOutput(lse=lse)
    return (out, lse) if wants_lse else out
