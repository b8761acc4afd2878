"""Masks that are no band, and biases of positions: attention with functions of scores and masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attention.attention import attention
from flash_attention.compat.transformers.band import CAUSAL, EVERYTHING, Band
from flash_attention.compat.transformers.functions import of_tokens
from flash_attention.compat.transformers.masks import Meaning
from flash_attention.mods import and_masks, dense_bias, dense_mask

_ATTRIBUTE = "flash_attention_kernels_tensor"


def meaning_of_tensor(mask: Tensor, q: Tensor, k: Tensor) -> Meaning:
    """What a mask of four dimensions says: causal or nothing where it is, else itself. It is looked at once.

    Args:
        mask: (batch|1, n_heads|1, seq_len_q, seq_len_k): bool, True where the query sees the key, or numbers
            that are added to the scores.
        q, k: of a layer, (batch, seq, heads, d).

    Raises:
        NotImplementedError: another shape or type.
    """
    sizes = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    fits = mask.ndim == 4 and all(has in (1, size) for has, size in zip(mask.shape, sizes, strict=True))
    if not fits or not (mask.dtype is torch.bool or mask.is_floating_point()):
        raise NotImplementedError(
            f"attention_mask has shape {tuple(mask.shape)} and type {mask.dtype}; known are (batch, tokens), "
            f"for padding, and what broadcasts to {sizes}, (batch, n_heads, seq_len_q, seq_len_k), of bools "
            'or of numbers that are added: use attn_implementation="sdpa" or "eager" for other masks'
        )
    known = getattr(mask, _ATTRIBUTE, None)
    # A tensor of inference mode does not tell whether it was changed: each layer looks at it.
    key = None if mask.is_inference() else (sizes, mask._version)
    if known is not None and known[0] == key:
        return known[1]  # type: ignore[no-any-return]
    band = None if torch.compiler.is_compiling() else _band_of(mask, *sizes[2:])
    meaning = Meaning(EVERYTHING if band is None else band, q.shape[1], k.shape[1], k.shape[1])
    if band is None:
        if mask.dtype is torch.bool:
            meaning.mask_mod = dense_mask(mask)
        else:
            meaning.score_mod = dense_bias(mask.float() if mask.dtype is torch.float64 else mask)
    if key is not None:
        setattr(mask, _ATTRIBUTE, (key, meaning))
    return meaning


def _band_of(mask: Tensor, seq_len_q: int, seq_len_k: int) -> Band | None:
    """The band of a mask that says the same for all items and heads; None: it says more."""
    if mask.requires_grad:
        return None
    if mask.dtype is torch.bool:
        seen = mask
    else:
        seen = mask == 0
        if not bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()):
            return None  # numbers that change scores
    if bool(seen.all()):
        return EVERYTHING
    if mask.shape[2:] == (seq_len_q, seq_len_k):
        causal = torch.ones(seq_len_q, seq_len_k, dtype=torch.bool, device=mask.device)
        if bool((seen == causal.tril(seq_len_k - seq_len_q)).all()):
            return CAUSAL
    return None


def with_mods(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meaning: Meaning,
    position_bias: Tensor | None,
    selected: list[Callable[..., Any]],
    options: dict[str, Any],
) -> Tensor:
    """Attention under a mask that is no band, or with a bias of positions that is added to the scores.

    Args:
        q, k, v: (batch, seq, heads, d).
        meaning: what the mask says.
        position_bias: what broadcasts to (batch, n_heads, seq_len_q, seq_len_k); None: nothing.
        selected: further masks (``selection``).
        options: keywords of ``attention``, which say the band.
    """
    masks = [*selected] if meaning.mask_mod is None else [*selected, meaning.mask_mod]
    if meaning.tokens is not None:
        masks.append(of_tokens(meaning.tokens))
    if meaning.starts is not None:
        masks.append(_of_sequences(meaning.starts))
    scores = [] if meaning.score_mod is None else [meaning.score_mod]
    if position_bias is not None:
        scores.append(dense_bias(_checked_bias(position_bias, q, k)[..., : meaning.n_keys]))
    out: Any = attention(
        q,
        k[:, : meaning.n_keys],
        v[:, : meaning.n_keys],
        mask_mod=and_masks(*masks) if masks else None,
        score_mod=_one_after_the_other(scores) if scores else None,
        **options,
    )
    return out  # type: ignore[no-any-return]


def _of_sequences(starts: Tensor) -> Callable[..., Any]:
    sequence = starts.cumsum(1)
    return lambda b, h, q_idx, kv_idx: sequence[b, q_idx] == sequence[b, kv_idx]


def _one_after_the_other(score_mods: list[Callable[..., Any]]) -> Callable[..., Any]:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        for one in score_mods:
            score = one(score, b, h, q_idx, kv_idx)
        return score

    return score_mod


def _checked_bias(position_bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    sizes = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if position_bias.ndim != 4 or any(
        has not in (1, size) for has, size in zip(position_bias.shape, sizes, strict=True)
    ):
        raise NotImplementedError(
            f"position_bias has shape {tuple(position_bias.shape)}; it must broadcast to {sizes}, (batch, "
            'n_heads, seq_len_q, seq_len_k): use attn_implementation="sdpa" or "eager"'
        )
    return position_bias
