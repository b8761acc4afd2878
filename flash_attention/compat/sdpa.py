"""PyTorch's ``scaled_dot_product_attention`` by this library: its signature, layout and causal alignment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attention.attention import attention
from flash_attention.checks.calls import check_head_sizes, check_heads, check_kinds
from flash_attention.checks.keywords import named_keywords
from flash_attention.checks.options import checked_dropout, checked_flag, checked_number, checked_scale, given
from flash_attention.checks.tensors import check_tensors
from flash_attention.compat.words import in_words
from flash_attention.mods.dense import dense_bias, dense_mask
from flash_attention.run.tracing import wants_autocast
from flash_helpers.kernels.problem import UNLIMITED, Window

NAMES = ("query", "key", "value")
MASK_TYPES = (torch.bool, torch.float16, torch.bfloat16, torch.float32)


@named_keywords
@in_words(
    q="query", k="key", v="value", causal="is_causal", softmax_scale="scale", score_mod="attn_mask",
    mask_mod="attn_mask",
)  # fmt: skip
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
    """``torch.nn.functional.scaled_dot_product_attention`` for 16-bit tensors.

    Args:
        query: (…, n_heads, seq_len_q, d_head), float16 or bfloat16; also without heads, (seq_len_q, d_head).
        key: (…, n_heads_kv, seq_len_k, d_head).
        value: (…, n_heads_kv, seq_len_k, d_head_v).
        attn_mask: a tensor that broadcasts to (…, n_heads, seq_len_q, seq_len_k), with two dimensions at
            least: of bools, True where the query sees the key; of float16, bfloat16 or float32, added to the
            scaled scores. It is read where it is, element by element. Or ``causal_upper_left(seq_len_q,
            seq_len_k)`` or ``causal_lower_right`` of ``torch.nn.attention.bias``, which are no tensors to a
            kernel. Queries without a visible key give 0. None: no mask.
        dropout_p: the probability that a weight is dropped, by PyTorch's generator of the device: other bits
            than PyTorch's own, as many of them.
        is_causal: key j is visible to query i when j <= i: aligned top-left, unlike ``attention``.
        scale: factor of the scores; None: d_head ** -0.5.
        enable_gqa: query heads may be a multiple of the heads of key and value.

    Returns:
        (…, n_heads, seq_len_q, d_head_v), a view of a contiguous (batch, seq_len_q, n_heads, d_head_v).

    Raises:
        ValueError, TypeError: arguments that do not fit; head counts that differ without enable_gqa;
            attn_mask together with is_causal, as in PyTorch.
    """
    check_heads_first(query, key, value, checked_flag("enable_gqa", enable_gqa))
    top_left, bottom_right, mods = _mask(query, key, attn_mask, checked_flag("is_causal", is_causal))
    if scale is not None:  # a tracer's number is looked at when the call runs
        compiling = torch.compiler.is_compiling()
        scale = (
            checked_number("scale", scale) if compiling else checked_scale(scale, query.shape[-1], "scale")
        )
    q, k, v = _heads_second(query), _heads_second(key), _heads_second(value)
    window: Window = UNLIMITED
    if top_left:
        k, v, window = _top_left(q, k, v)
    result = attention(
        q,
        k,
        v,
        causal=bottom_right,
        softmax_scale=scale,
        window=window,
        dropout_p=checked_dropout(dropout_p),
        **mods,
    )
    assert isinstance(result, Tensor)  # without return_lse
    out = result.transpose(1, 2)
    if query.ndim == 4:
        return out
    return out.reshape(*query.shape[:-3], *out.shape[1:]) if query.ndim >= 3 else out[0, 0]


def check_heads_first(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """The caller's tensors under the caller's names, before anything is cut off or transposed."""
    tensors = dict(zip(NAMES, (query, key, value), strict=True))
    check_tensors(tensors)
    check_kinds(tensors, any_dtype=wants_autocast(query, key, value))
    shapes = f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
    if not query.ndim == key.ndim == value.ndim or query.ndim < 2:
        raise ValueError(f"query, key and value must be (…, n_heads, seq, d); given {shapes}")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            f"query, key and value must agree in all dimensions before n_heads; given {shapes}: use "
            "key.expand(…) to share keys"
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have one head size; given {shapes}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key and value must agree in all but the head size; given {shapes}")
    check_head_sizes(query.shape[-1], value.shape[-1], ("query and key", "value"))
    if query.ndim == 2:
        return
    n_heads, n_heads_kv = query.shape[-3], key.shape[-3]
    if n_heads == n_heads_kv:
        return
    hint = ""
    if query.shape[-2] == key.shape[-2] and (not n_heads_kv or n_heads % n_heads_kv):
        hint = (
            ". The shapes look like (batch, seq, heads, d): pass query.transpose(1, 2) and so on, or call "
            "flash_attention.attention, which takes that order"
        )
    if not enable_gqa:
        raise ValueError(
            f"query has {n_heads} heads, key {n_heads_kv}; heads are shared only with enable_gqa=True{hint}"
        )
    check_heads(n_heads, n_heads_kv, NAMES, hint)


def _mask(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> tuple[bool, bool, dict[str, Any]]:
    """Whether the mask is causal from the top left, from the bottom right, and what else it says, as mods."""
    if attn_mask is None:
        return is_causal, False, {}
    from torch.nn.attention.bias import CausalBias, CausalVariant  # with it comes all of torch's compiler

    if not isinstance(attn_mask, Tensor):
        raise TypeError(
            f"attn_mask is {given(attn_mask)}; it must be a tensor, a mask of torch.nn.attention.bias, "
            "or None"
        )
    if is_causal:
        raise ValueError(
            "attn_mask is given and is_causal is True, which PyTorch refuses, too: pass one of them"
        )
    if not isinstance(attn_mask, CausalBias):
        mask = _four_dimensions(query, key, attn_mask)
        return (
            False,
            False,
            {"mask_mod": dense_mask(mask)} if mask.dtype is torch.bool else {"score_mod": dense_bias(mask)},
        )
    lengths = (query.shape[-2], key.shape[-2])
    if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != lengths:
        raise ValueError(
            f"attn_mask is for {attn_mask.seq_len_q} queries and {attn_mask.seq_len_kv} keys; query and key "
            f"have {lengths[0]} and {lengths[1]}: make it for these"
        )
    lower_right = attn_mask.variant == CausalVariant.LOWER_RIGHT
    return not lower_right, lower_right, {}


def _four_dimensions(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """A mask tensor with two to four dimensions, checked. Several dimensions before the heads become one."""
    check_tensors({"attn_mask": mask})
    if mask.dtype not in MASK_TYPES:
        raise TypeError(
            f"attn_mask has the type {mask.dtype}; it must be bool, True where a query sees a key, or "
            "float16, bfloat16 or float32, which is added to the scores"
        )
    if mask.device != query.device:
        raise ValueError(f"attn_mask is on {mask.device}, and query on {query.device}: move it there")
    sizes = (*query.shape[:-1], key.shape[-2])
    of_mask = zip(reversed(mask.shape), reversed(sizes), strict=False)
    if not 2 <= mask.ndim <= len(sizes) or any(has not in (1, size) for has, size in of_mask):
        of_keys = len(sizes) == 4 and tuple(mask.shape) == (sizes[0], sizes[-1])
        raise ValueError(
            f"attn_mask has shape {tuple(mask.shape)}; it must have two dimensions at least and broadcast to "
            f"{sizes}, (…, n_heads, seq_len_q, seq_len_k)"
            + ": pass attn_mask[:, None, None, :], if it says which keys of an item are padding"
            * of_keys
        )
    if mask.ndim <= 4:
        if mask.ndim == 4 and len(sizes) > 4 and mask.shape[0] != 1:  # of several dimensions the last one
            return mask.expand(*sizes[:-3], *mask.shape[1:]).flatten(0, -4)
        return mask
    return mask.expand(*sizes[:-3], *mask.shape[-3:]).flatten(0, -4)


def _top_left(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Window]:
    """k, v and the window with which ``attention`` shows key j to query i when j <= i."""
    seq_len_q, seq_len_k = q.shape[1], k.shape[1]
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
