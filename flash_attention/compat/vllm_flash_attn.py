"""The functions of vLLM's flash-attn (``vllm.vllm_flash_attn``) by their names, signatures and meaning.

What this library does not do is refused with ``NotImplementedError`` naming the argument, never ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attention.attention import attention_varlen
from flash_attention.checks.keywords import named_keywords
from flash_attention.checks.layouts import check_packed_cache
from flash_attention.checks.options import checked_flag, given, refuse
from flash_attention.checks.tensors import (
    check_output_kind,
    check_tensors,
    records_gradients,
)
from flash_attention.compat.alibi import alibi, checked_slopes, is_ordered
from flash_attention.compat.arguments import host_number, options_of, parts_of
from flash_attention.compat.padding import Result, check_unpadded, cut, missing_columns, padded
from flash_attention.compat.places import counted, in_items, in_packed, room_for_keys
from flash_attention.compat.words import in_words
from flash_attention.compat.written import check_written
from flash_attention.layouts import BATCHES, PACKED
from flash_attention.run.tracing import wants_autocast

__all__ = ["flash_attn_varlen_func", "get_scheduler_metadata"]

VERSIONS = (2, 3, 4)  # of the FlashAttentions among which vLLM chooses


@named_keywords
@in_words(sinks="s_aux", n_splits="num_splits", return_lse="return_softmax_lse", score_mod="alibi_slopes")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
    *,
    output_scale: Tensor | None = None,
    mask_mod: None = None,
    block_sparse_tensors: None = None,
    aux_tensors: None = None,
    aux_tensor_leading_dims: None = None,
    dynamic_causal: Tensor | None = None,
) -> Result:
    """Attention within packed sequences, over packed keys or pages: prompts, chunks, decoding and drafts.

    Args:
        q: (total_q, n_heads, d_head), float16 or bfloat16.
        k: (total_k, n_heads_kv, d_head), or with ``block_table`` (n_pages, page_size, n_heads_kv, d_head).
        v: likewise.
        max_seqlen_q: the most queries of one sequence.
        cu_seqlens_q: (batch + 1,) int32 on the device of q: 0, then the end of each sequence in q.
        max_seqlen_k: the most keys of one sequence.
        cu_seqlens_k: likewise in packed keys.
        seqused_k: (batch,) int32, how many keys each sequence has, with ``block_table``.
        softmax_scale: factor of the scores; None: d_head ** -0.5.
        causal: key j is visible to query i of a sequence when j <= i + seq_len_k - seq_len_q.
        window_size: (left, right), keys that are visible before and after that place; -1: all; None: all.
        softcap: scores become softcap * tanh(score / softcap); 0: they stay.
        block_table: (batch, max_pages) int32, the pages of each sequence.
        return_softmax_lse: also return the log-sum-exp.
        return_attn_probs: of no influence, as there: return_softmax_lse says what is returned.
        out: is written and returned.
        num_splits: parts that keys are cut into; 0: the device finds a number for each sequence.
        fa_version: 2, 3 or 4, of no influence: the library chooses its kernels.
        s_aux: (n_heads,) one more logit a head, which has no value.
        deterministic: of no influence: there is no gradient.
        alibi_slopes: (n_heads,) or (batch, n_heads) float32: query i and key j get
            -slope * |i + seq_len_k - seq_len_q - j| to their score. On a GPU of packed keys alone, with no
            seqused_k and num_splits 0.
        q_descale, k_descale, v_descale: (batch, n_heads_kv) float32, the scales of 8-bit types. vLLM passes
            them with 16-bit ones too, where they are checked and say nothing, as there.
        q_v, dropout_p, scheduler_metadata, cp_tot_seqused_k: None, or 0.0.
        output_scale, mask_mod, block_sparse_tensors, aux_tensors, aux_tensor_leading_dims, dynamic_causal:
            None. By name alone: their places differ from one vLLM to the next.
        cp_world_size: 1.
        cp_rank: 0.

    Returns:
        out (total_q, n_heads, d_head_v) like q; with ``return_softmax_lse`` (out, lse (n_heads, total_q)
        float32).

    Raises:
        NotImplementedError: what is to be None, 0.0, 1 or 0 and is not; scales of 8-bit q, k or v.
        and what ``flash_attention.attention_varlen`` raises.
    """
    refuse(
        q_v=q_v, dropout_p=dropout_p, scheduler_metadata=scheduler_metadata, cp_rank=cp_rank,
        cp_tot_seqused_k=cp_tot_seqused_k, output_scale=output_scale, mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors,
        aux_tensor_leading_dims=aux_tensor_leading_dims, dynamic_causal=dynamic_causal,
    )  # fmt: skip
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if any(isinstance(x, Tensor) and x.dtype.itemsize == 1 for x in (q, k, v)):
        refuse(**scales)
    if records_gradients(q, k, v, s_aux):
        raise NotImplementedError(
            "q, k, v or s_aux requires grad, and this function, as vLLM's, has no gradient: call it under "
            "torch.no_grad(), or flash_attention.attention_varlen"
        )
    if type(cp_world_size) is not int or cp_world_size != 1:
        raise NotImplementedError(
            f"cp_world_size is {given(cp_world_size)}; keys of other ranks are not read: pass 1, and "
            "merge the results of the ranks with flash_attention.merge"
        )
    if type(fa_version) is not int or fa_version not in VERSIONS:
        raise ValueError(
            f"fa_version is {given(fa_version)}; it must be one of {VERSIONS}, and changes nothing"
        )
    checked_flag("deterministic", deterministic)
    checked_flag("return_attn_probs", return_attn_probs)
    window: Any = (-1, -1) if window_size is None else window_size
    options: dict[str, Any] = options_of(
        q, softmax_scale, causal, window, softcap, ("return_softmax_lse", return_softmax_lse)
    )
    options |= {"sinks": s_aux, "n_splits": parts_of(num_splits)}
    if seqused_k is not None:
        options["seqused_k"] = seqused_k
    if block_table is not None:
        options["block_table"] = block_table
    _check_keys(cu_seqlens_k, seqused_k, block_table)
    check_unpadded(q, k, v, PACKED, None if cu_seqlens_k is not None else BATCHES)
    if any(scale is not None for scale in scales.values()):
        _check_idle_scales(scales, cu_seqlens_q, k)
    longest = host_number("max_seqlen_q", max_seqlen_q), host_number("max_seqlen_k", max_seqlen_k)
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    tensors |= {"seqused_k": seqused_k, "block_table": block_table, "s_aux": s_aux}
    if alibi_slopes is not None:
        check_packed_cache(q, k, cu_seqlens_q, cu_seqlens_k, None, seqused_k, block_table, *longest)
        slopes = checked_slopes(alibi_slopes, q, cu_seqlens_q.numel() - 1)
        if out is not None:
            check_tensors({"out": out})
            check_written("out", out, {"alibi_slopes": alibi_slopes})
        if seqused_k is not None:
            room = room_for_keys(k, cu_seqlens_k, block_table)
            place = in_items(counted(seqused_k, room), cu_seqlens_q.diff())
        else:
            assert cu_seqlens_k is not None  # else nothing says how many keys there are
            place = in_packed(cu_seqlens_q, cu_seqlens_k)
        options["score_mod"] = alibi(slopes, place, is_ordered(options))
    at_once = out is not None and not missing_columns(v)
    if out is not None and not at_once:
        _check_copied_output(out, {name: x for name, x in tensors.items() if x is not None})
    with torch.no_grad():
        result = cut(
            attention_varlen(
                padded(q), padded(k), padded(v), cu_seqlens_q, cu_seqlens_k, *longest,
                **options, out=out if at_once else None,
            ),
            v,
        )  # fmt: skip
        if out is None or at_once:
            return result
        out.copy_(result[0] if isinstance(result, tuple) else result)
    return (out, *result[1:]) if isinstance(result, tuple) else out


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
    window_size: Sequence[int] = (-1, -1),
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> None:
    """None, whatever the call will be: its work is planned on the device, in the call itself.

    flash-attn 3's function of this name has an ``attention_chunk`` before ``has_softcap``; vLLM's has none.

    Raises:
        NotImplementedError: sm_margin, which no call takes.
    """
    refuse(sm_margin=sm_margin)


def _check_keys(cu_seqlens_k: Tensor | None, seqused_k: Tensor | None, block_table: Tensor | None) -> None:
    """Where keys lie, and how many there are."""
    counts = {"cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k, "block_table": block_table}
    check_tensors({name: x for name, x in counts.items() if x is not None})
    if cu_seqlens_k is not None and block_table is not None:
        raise ValueError(
            "cu_seqlens_k and block_table are both given: keys are packed, or in pages. With block_table "
            "seqused_k says how many there are: pass cu_seqlens_k=None"
        )
    if cu_seqlens_k is None and seqused_k is None:
        raise ValueError(
            "cu_seqlens_k is None, and so is seqused_k; nothing says how many keys a sequence has: pass "
            "seqused_k (batch,) for pages or a cache, or cu_seqlens_k (batch + 1,) for packed keys"
        )


def _check_idle_scales(scales: dict[str, Tensor | None], cu_seqlens_q: Tensor, k: Tensor) -> None:
    """Scales of 8-bit types beside tensors of 16 bits, where nobody reads them."""
    check_tensors({"cu_seqlens_q": cu_seqlens_q})
    shape = cu_seqlens_q.numel() - 1, k.shape[-2]
    for name, scale in scales.items():
        if scale is None:
            continue
        check_tensors({name: scale})
        if scale.dtype is not torch.float32 or tuple(scale.shape) != shape or scale.device != k.device:
            raise ValueError(
                f"{name} is {scale.dtype} of shape {tuple(scale.shape)} on {scale.device}; beside k "
                f"{tuple(k.shape)} on {k.device} and cu_seqlens_q {tuple(cu_seqlens_q.shape)} it must be "
                f"torch.float32 of shape {shape}, (batch, n_heads_kv), there, or None"
            )


def _check_copied_output(out: Tensor, inputs: dict[str, Tensor]) -> None:
    """An output of a head size that is padded: the result is copied into it, whatever its strides are."""
    check_tensors({"out": out, **inputs})
    q, v = inputs["q"], inputs["v"]
    kept = not wants_autocast(q, inputs["k"], v)
    dtype = q.dtype if kept else torch.get_autocast_dtype(q.device.type)
    check_output_kind("out", out, (*q.shape[:-1], v.shape[-1]), dtype, q.device)
    check_written("out", out, inputs)
