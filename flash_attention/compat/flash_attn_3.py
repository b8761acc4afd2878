"""The functions of flash-attn 3 (its module ``flash_attn_interface``) by their names, signatures and meaning.

What this library does not do is refused with ``NotImplementedError`` naming the argument, never ignored. What
changes no result but its time and its rounding is taken and may have no influence: ``pack_gqa``, and
``num_splits`` where keys are no cache. ``scheduler_metadata`` is None, as ``get_scheduler_metadata`` gives
it: the work of a call is planned on the device, in the call. A window of -1 is no limit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attention.attention import attention, attention_varlen
from flash_attention.checks.keywords import named_keywords
from flash_attention.checks.layouts import check_packed_cache
from flash_attention.checks.options import checked_flag, refuse
from flash_attention.checks.tensors import (
    check_no_gradient,
    check_output_kind,
    check_tensors,
)
from flash_attention.compat.arguments import checked_packing, host_number, in_one_piece, options_of, parts_of
from flash_attention.compat.merge_state import check_parts
from flash_attention.compat.packed_cache import Rotary, attend_packed_cache
from flash_attention.compat.padding import Result, check_unpadded, cut, padded
from flash_attention.compat.places import counted, in_batches, in_items, in_packed
from flash_attention.compat.within_chunks import checked_chunk, within_chunks
from flash_attention.compat.words import in_words
from flash_attention.compat.written import check_written
from flash_attention.layouts import BATCHES, PACKED
from flash_attention.merge import merge, merged_type

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


@named_keywords
@in_words(score_mod="attention_chunk", mask_mod="attention_chunk")
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of each query to the keys of its batch item.

    Args:
        q: (batch, seq_len_q, n_heads, d_head), float16 or bfloat16.
        k: (batch, seq_len_k, n_heads_kv, d_head), of the type of q; n_heads is a multiple of n_heads_kv.
        v: (batch, seq_len_k, n_heads_kv, d_head_v), likewise.
        softmax_scale: factor of the scores; None: d_head ** -0.5.
        causal: key j is visible to query i when j <= i + seq_len_k - seq_len_q.
        window_size: (left, right), keys that are visible before and after that place; -1: all.
        attention_chunk: a query sees the keys of its own chunk of so many places; 0: of all.
        softcap: scores become softcap * tanh(score / softcap); 0.0: they stay.
        num_splits: 0 or more; the library chooses how many parts keys are cut into.
        pack_gqa: True, False or None, of no influence: the library chooses how heads are packed.
        deterministic: equal calls give equal gradients.
        qv, q_descale, k_descale, v_descale: None.
        sm_margin: 0.
        return_attn_probs: also return the log-sum-exp.

    Returns:
        out (batch, seq_len_q, n_heads, d_head_v) like q; with ``return_attn_probs`` (out, lse (batch,
        n_heads, seq_len_q) float32).

    Raises:
        NotImplementedError: qv, q_descale, k_descale, v_descale, sm_margin.
        and what ``flash_attention.attention`` raises.
    """
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, sm_margin=sm_margin)
    parts_of(num_splits)
    checked_packing("pack_gqa", pack_gqa)
    lse = ("return_attn_probs", return_attn_probs)
    options = options_of(q, softmax_scale, causal, window_size, softcap, lse)
    options["deterministic"] = checked_flag("deterministic", deterministic)
    check_unpadded(q, k, v, BATCHES)
    if size := checked_chunk(attention_chunk):
        options["mask_mod"] = within_chunks(size, in_batches(k.shape[1] - q.shape[1]))
    return cut(attention(padded(q), padded(k), padded(v), **options), v)


@named_keywords
@in_words(score_mod="attention_chunk", mask_mod="attention_chunk")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention within each of several sequences that are packed one behind the other.

    Args:
        q: (total_q, n_heads, d_head), float16 or bfloat16.
        k: (total_k, n_heads_kv, d_head), of the type of q; n_heads is a multiple of n_heads_kv.
        v: (total_k, n_heads_kv, d_head_v), likewise.
        cu_seqlens_q: (batch + 1,) int32 on the device of q: 0, then the end of each sequence in q.
        cu_seqlens_k: likewise in k and v.
        max_seqlen_q: the most queries of one sequence.
        max_seqlen_k: the most keys of one sequence.
        seqused_q: (batch,) int32, of each sequence's queries only so many count; the output of the others
            is 0. None: all. With it, or with ``seqused_k``, there is no gradient.
        seqused_k: (batch,) int32, of each sequence's keys only so many count; None: all.
        softmax_scale and all behind it: as in ``flash_attn_func``, within each sequence.

    Returns:
        out (total_q, n_heads, d_head_v) like q; with ``return_attn_probs`` (out, lse (n_heads, total_q)
        float32).

    Raises:
        NotImplementedError: as ``flash_attn_func``.
        and what ``flash_attention.attention_varlen`` raises.
    """
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, sm_margin=sm_margin)
    n_splits = parts_of(num_splits)
    checked_packing("pack_gqa", pack_gqa)
    lse = ("return_attn_probs", return_attn_probs)
    options = options_of(q, softmax_scale, causal, window_size, softcap, lse)
    options["deterministic"] = checked_flag("deterministic", deterministic)
    check_tensors({"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k})
    cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    seqused_q, seqused_k = in_one_piece(seqused_q=seqused_q, seqused_k=seqused_k)
    check_unpadded(q, k, v, PACKED)
    longest = host_number("max_seqlen_q", max_seqlen_q), host_number("max_seqlen_k", max_seqlen_k)
    if seqused_q is not None or seqused_k is not None:
        options |= {"seqused_q": seqused_q, "seqused_k": seqused_k, "n_splits": n_splits}
    if size := checked_chunk(attention_chunk):
        check_packed_cache(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, None, *longest)
        place = in_packed(cu_seqlens_q, cu_seqlens_k)
        if seqused_q is not None or seqused_k is not None:
            place = in_items(counted(seqused_k, cu_seqlens_k.diff()), counted(seqused_q, cu_seqlens_q.diff()))
        options["mask_mod"] = within_chunks(size, place)
    out = attention_varlen(padded(q), padded(k), padded(v), cu_seqlens_q, cu_seqlens_k, *longest, **options)
    return cut(out, v)


@named_keywords
@in_words(block_table="page_table", score_mod="attention_chunk", mask_mod="attention_chunk")
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Attention to a cache of keys and values, after k and v are appended to it in place.

    No length is read on the host, so that all lengths and tables may change between replays of a CUDA graph.

    Args:
        q: (batch, seq_len_q, n_heads, d_head), or with ``cu_seqlens_q`` (total_q, n_heads, d_head).
        k_cache: (batch_cache, capacity, n_heads_kv, d_head), of the type of q; with ``page_table`` (n_pages,
            page_size, n_heads_kv, d_head), pages of any size. Where k is appended, no elements of the caches
            may share memory; with ``cache_leftpad`` its rows follow each other.
        v_cache: like k_cache.
        k: (batch, seq_len_new, n_heads_kv, d_head), or with ``cu_seqlens_k_new`` (total_new, n_heads_kv,
            d_head), appended behind ``cache_seqlens``. There must be room, which on a CUDA device is not
            checked before the launch: what is not there is an error of the device.
        v: like k.
        rotary_cos: (seq_len_rotary, d_rotary / 2), applied to q and k at their positions.
        rotary_sin: like rotary_cos.
        cache_seqlens: keys in the cache before the call, padding on the left included, (batch,) int32 or one
            int; None: the capacity.
        cache_batch_idx: (batch,) int32 or int64, the item of the cache, or the row of ``page_table``, for
            each batch item; None: the first.
        cache_leftpad: (batch,) int32, rows of padding before each item's first key.
        page_table: (batch, max_pages) int32, the pages of each batch item.
        cu_seqlens_q: (batch + 1,) int32, 0 and the end of each item's queries.
        cu_seqlens_k_new: likewise of what is appended. Without k and v it is checked and says nothing, as
            there: SGLang passes the ends of the cache's keys.
        max_seqlen_q: the most queries of one item; needed with ``cu_seqlens_q``.
        rotary_seqlens: (batch,) int32, the position of each item's first query and first new key; None:
            ``cache_seqlens``. Without tables it is checked and says nothing, as there.
        rotary_interleaved: rotate neighbouring columns; else column i and i + d_rotary / 2.
        num_splits: parts that keys are cut into; 0: the device finds a number for each item.
        qv, q_descale, k_descale, v_descale, scheduler_metadata: None.
        return_softmax_lse: also return the log-sum-exp.
        softmax_scale, causal, window_size, attention_chunk, softcap, pack_gqa, sm_margin: as in
            ``flash_attn_func``.

    Returns:
        out like q; with ``return_softmax_lse`` (out, lse (batch, n_heads, seq_len_q) float32, or packed
        (n_heads, total_q)).

    Raises:
        NotImplementedError: qv, q_descale, k_descale, v_descale, scheduler_metadata, sm_margin.
        ValueError, TypeError: arguments that do not fit each other; what ``attention_varlen`` raises.
    """
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, sm_margin=sm_margin)
    refuse(scheduler_metadata=scheduler_metadata)
    checked_packing("pack_gqa", pack_gqa)
    lse = ("return_softmax_lse", return_softmax_lse)
    cu_seqlens_q, cu_seqlens_k_new, cache_leftpad, rotary_seqlens = in_one_piece(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, cache_leftpad=cache_leftpad,
        rotary_seqlens=rotary_seqlens,
    )  # fmt: skip
    return attend_packed_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=None if max_seqlen_q is None else host_number("max_seqlen_q", max_seqlen_q),
        cu_seqlens_k_new=cu_seqlens_k_new,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=page_table,
        rotary=Rotary(
            rotary_cos, rotary_sin, checked_flag("rotary_interleaved", rotary_interleaved), rotary_seqlens
        ),
        attention_chunk=checked_chunk(attention_chunk),
        n_splits=parts_of(num_splits),
        options=options_of(q, softmax_scale, causal, window_size, softcap, lse),
    )


@named_keywords
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attention over parts of them.

    Args:
        out_partial: (n_parts, batch, seq_len, n_heads, d_head_v).
        lse_partial: (n_parts, batch, seq_len, n_heads), float32.
        out: (batch, seq_len, n_heads, d_head_v), written and returned; None: a new one. Then nothing is
            differentiated.
        out_dtype: type of the output; None: that of ``out_partial``.

    Returns:
        out (batch, seq_len, n_heads, d_head_v), and lse (batch, seq_len, n_heads) float32.

    Raises:
        NotImplementedError: a gradient is wanted through ``out``.
        TypeError, ValueError: parts, or an ``out``, that do not fit; what ``flash_attention.merge`` raises.
    """
    axes = "(n_parts, batch, seq_len, n_heads, d)"
    lse_types = (torch.float32, torch.float64)
    check_parts("out_partial", out_partial, "lse_partial", lse_partial, axes, parts=0, lse_types=lse_types)
    given = {"out_partial": out_partial, "lse_partial": lse_partial}
    out_dtype = merged_type(out_dtype, out_partial)
    if out is not None:
        check_tensors({"out": out})
        check_no_gradient({"out": out, **given}, "what is written in place has no gradient", "pass out=None")
        check_output_kind("out", out, tuple(out_partial.shape[1:]), out_dtype, out_partial.device)
        check_written("out", out, given)
    parts = list(out_partial.unbind(0)), [lse.transpose(-1, -2) for lse in lse_partial.unbind(0)]
    merged, lse = merge(*parts, out_dtype=out_dtype)
    if out is not None:
        merged = out.copy_(merged)
    return merged, lse.transpose(-1, -2)


@named_keywords
def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> None:
    """None, whatever the call will be: its work is planned on the device, in the call itself.

    Raises:
        NotImplementedError: sm_margin, which the call would refuse.
    """
    refuse(sm_margin=sm_margin)
