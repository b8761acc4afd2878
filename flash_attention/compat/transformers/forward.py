"""The attention of one layer, with the arguments that Transformers passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attention.attention import attention
from flash_attention.cached import attention_cached
from flash_attention.compat.transformers import packing, padding
from flash_attention.compat.transformers.band import EVERYTHING, Band
from flash_attention.compat.transformers.keywords import check_keywords
from flash_attention.compat.transformers.masks import Meaning, meaning_of
from flash_attention.compat.transformers.mods import meaning_of_tensor, with_mods
from flash_attention.compat.transformers.selection import masks_of_selections
from flash_attention.torch_private import assert_async


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    deterministic: bool | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer.

    Args:
        query: (batch, n_heads, seq_len_q, d_head).
        key: (batch, n_heads_kv, seq_len_k, d_head).
        value: like key.
        attention_mask: of ``padding_mask``, which says what a query sees. Or of four dimensions, (batch|1,
            n_heads|1, seq_len_q, seq_len_k): bools, or numbers that are added to the scores; it says all.
            Without one, or with a model's own (batch, tokens), is_causal and sliding_window say it.
        dropout: the probability that a weight is dropped, of a module in training; in evaluation none is.
        sliding_window: a query sees this many tokens, itself among them.
        is_causal: None: what the module's ``is_causal`` says.
        s_aux: (n_heads,) sinks.
        position_ids: (batch, tokens), from which packed sequences are read.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences.
        deterministic: equal calls give equal gradients; None: no, unless PyTorch's own switch says so.
        position_bias: what broadcasts to (batch, n_heads, seq_len_q, seq_len_k), added to the scaled scores.
        indices: (batch, seq_len_q, any number) of keys: a query sees these alone.
        block_indices: (batch, heads of the indexer, seq_len_q, any number) of blocks of keys; -1: none.
        keywords: refused if they may mean anything.

    Returns:
        out (batch, seq_len_q, n_heads, d_head_v), and None for the weights, which are never there.

    Raises:
        NotImplementedError: what no kernel computes; the message names it.
        TypeError: not float16 or bfloat16: load the model with ``dtype="bfloat16"``.
        ValueError: arguments that contradict one another.
    """
    check_keywords(keywords)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    meaning = meaning_of(attention_mask)
    if meaning is None and attention_mask is not None and attention_mask.ndim != 2:
        meaning = meaning_of_tensor(attention_mask, q, k)
    elif meaning is None:
        meaning = _meaning_by_layer(module, q, k, attention_mask, is_causal, sliding_window)
    else:
        _check_sizes(meaning, q, k)
        _check_window(meaning, sliding_window)
    band = meaning.band
    options: dict[str, Any] = {
        "causal": band.right == 0,
        "softmax_scale": scaling,
        "window": (band.left, None if band.right == 0 else band.right),
        "softcap": softcap or 0.0,
        "dropout_p": dropout if module.training else 0.0,
        "deterministic": deterministic is not None and deterministic,
        "sinks": s_aux if s_aux is None or s_aux.dtype is q.dtype else s_aux.float(),
    }
    selected = masks_of_selections(module, indices, block_indices, q, k)
    if position_bias is not None or selected or meaning.has_mods:
        if meaning.counts is not None or cu_seq_lens_q is not None:
            what = "a mask that is no band" if position_bias is None else "position_bias"
            what = f"a selection of keys ({'block_' * (indices is None)}indices)" if selected else what
            raise NotImplementedError(
                f"{what} came with packed sequences (cu_seq_lens_q), or in a trace with a static cache; they "
                'are not computed together: use attn_implementation="sdpa" or "eager"'
            )
        return with_mods(q, k, v, meaning, position_bias, selected, options), None
    given = packing.given_packing(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, q, k)
    if meaning.tokens is not None:
        if given is not None:
            raise ValueError(
                "cu_seq_lens_q was given with a mask that has padding; packed sequences have none: pass no "
                "attention_mask"
            )
        k, v = k[:, : meaning.n_keys], v[:, : meaning.n_keys]
        return padding.of_tokens(q, k, v, meaning, options), None
    sequences = given or _packing_of_positions(meaning, attention_mask, position_ids, q, k)
    if sequences is not None:
        return packing.within_sequences(q, k, v, sequences, options), None
    if meaning.counts is not None:
        cached: Any = attention_cached(q, k, v, meaning.counts, **options)
        return cached, None
    out: Any = attention(q, k[:, : meaning.n_keys], v[:, : meaning.n_keys], **options)
    return out, None


def _meaning_by_layer(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> Meaning:
    """What a layer says itself, as for the other flash attentions of Transformers."""
    seq_len_k = k.shape[1]
    if mask is not None and (mask.ndim != 2 or mask.shape[0] != q.shape[0] or mask.shape[1] > seq_len_k):
        raise NotImplementedError(
            f"attention_mask has shape {tuple(mask.shape)}; only (batch, tokens) is known, for padding, with "
            f'at most {seq_len_k} tokens here: use attn_implementation="sdpa" or "eager" for other masks'
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        raise NotImplementedError(
            f"nothing says whether the attention of {type(module).__name__} is causal: neither its mask, nor "
            "is_causal, nor an attribute is_causal of the module"
        )
    if is_causal:
        band = Band(None if sliding_window is None else sliding_window - 1, 0)
    elif sliding_window is not None:
        band = Band(sliding_window - 1, sliding_window - 1)
    else:
        band = EVERYTHING
    n_keys = seq_len_k if mask is None else mask.shape[1]
    return Meaning(band, q.shape[1], seq_len_k, n_keys, tokens=None if mask is None else mask.bool())


def _check_sizes(meaning: Meaning, q: Tensor, k: Tensor) -> None:
    is_right = k.shape[1] == meaning.kv_length
    if meaning.band.has_limits or meaning.has_mods:
        is_right = is_right and q.shape[1] == meaning.q_length
    if not is_right:
        raise NotImplementedError(
            f"the mask was made for {meaning.q_length} queries and {meaning.kv_length} keys, and the layer "
            f'has {q.shape[1]} and {k.shape[1]}: use attn_implementation="sdpa" or "eager"'
        )
    if meaning.tokens is not None and meaning.tokens.shape[0] != q.shape[0]:
        raise NotImplementedError(
            f"the mask was made for a batch of {meaning.tokens.shape[0]}, and the layer has {q.shape[0]}: "
            'use attn_implementation="sdpa" or "eager"'
        )


def _check_window(meaning: Meaning, sliding_window: int | None) -> None:
    """The layer's window is the mask's, if it cuts anything."""
    if meaning.has_mods:  # which say all
        return
    if sliding_window is None or sliding_window >= meaning.kv_length or meaning.band.left is not None:
        return
    raise NotImplementedError(
        f"sliding_window is {sliding_window}, and the mask of this layer has no window; which of the two the "
        'model means is not clear: use attn_implementation="sdpa" or "eager"'
    )


def _packing_of_positions(
    meaning: Meaning, mask: Tensor | None, position_ids: Tensor | None, q: Tensor, k: Tensor
) -> packing.Packing | None:
    """Packed sequences by the mask or, without one, by the positions. They must not contradict each other."""
    seq_len = q.shape[1]
    if position_ids is not None and (position_ids.ndim != 2 or position_ids.shape[1] != seq_len):
        position_ids = None  # of rotations in several dimensions
    if seq_len == 1 or k.shape[1] != seq_len:
        position_ids = None  # of new tokens behind a cache
    if torch.compiler.is_compiling():
        message = (
            "position_ids start anew, as those of packed sequences do, and can't be read under "
            "torch.compile: pass cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k as well"
        )
        if meaning.starts is not None:
            assert_async(~meaning.starts[:, 1:].any(), message)
        elif position_ids is not None:
            is_start: Tensor = position_ids == position_ids.min(1, keepdim=True).values
            assert_async((is_start.sum(1) == 1).all(), message)
        return None
    if "packing" in meaning.memory:
        return meaning.memory["packing"]
    if position_ids is None:
        starts = meaning.starts
    else:
        starts = packing.starts_of_positions(position_ids.expand(q.shape[0], -1))
    if mask is not None and position_ids is not None:
        is_same = (starts is None) == (meaning.starts is None)
        if starts is not None and meaning.starts is not None:
            is_same = torch.equal(starts, meaning.starts)
        if not is_same:
            raise NotImplementedError(
                "position_ids and the mask of this layer do not agree on where packed sequences start: "
                "Transformers packs a mask by positions only without a cache and without attention_mask: "
                "pass use_cache=False and no attention_mask, and positions that count from the same number "
                "in each sequence"
            )
    result = None if starts is None else packing.packing_of_starts(starts)
    meaning.memory["packing"] = result
    return result
