"""The functions of flash-attn 2.8 by their names, with its signatures and meaning: only the import changes.

What this library does not do is refused with ``NotImplementedError`` naming the argument, never ignored.
``deterministic`` speaks of the backward pass, as it does there. A window of -1 is no limit. With
``return_attn_probs`` the third result is empty, as it is there without dropout. Head sizes up to 256 that are
no multiple of 8 are padded with zeros, which copies the tensors, as it does there. Signatures are written
out, since type checkers, editors and the API page read them.
"""

from __future__ import annotations

from torch import Tensor

from flash_attention.attention import attention, attention_varlen
from flash_attention.checks.keywords import named_keywords
from flash_attention.checks.layouts import check_block_table, check_offset_values, check_packing
from flash_attention.checks.options import checked_dropout, checked_flag
from flash_attention.checks.tensors import check_tensors
from flash_attention.compat.alibi import alibi, checked_slopes, is_ordered
from flash_attention.compat.arguments import host_number, options_of, parts_of
from flash_attention.compat.kv_cache import MAX_INT32, attend_with_cache
from flash_attention.compat.packed_cache import Rotary, attend_packed_cache
from flash_attention.compat.padding import Result, check_unpadded, cut, padded
from flash_attention.compat.places import counted, in_batches, in_items, in_packed, room_for_keys
from flash_attention.compat.unpacked import unpacked
from flash_attention.compat.words import in_words
from flash_attention.layouts import BATCHES, PACKED
from flash_attention.run.tracing import is_readable

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


# ---------------------------------------------------------------------- batches
@named_keywords
@in_words(score_mod="alibi_slopes")
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of each query to the keys of its batch item.

    Args:
        q: (batch, seq_len_q, n_heads, d_head), float16 or bfloat16.
        k: (batch, seq_len_k, n_heads_kv, d_head), of the type of q; n_heads is a multiple of n_heads_kv.
        v: (batch, seq_len_k, n_heads_kv, d_head_v), likewise.
        dropout_p: the probability that a weight is dropped, by PyTorch's generator of the device.
        softmax_scale: factor of the scores; None: d_head ** -0.5.
        causal: key j is visible to query i when j <= i + seq_len_k - seq_len_q.
        window_size: (left, right), keys that are visible before and after that place; -1: all.
        softcap: scores become softcap * tanh(score / softcap); 0.0: they stay.
        alibi_slopes: (n_heads,) or (batch, n_heads) float32: query i and key j get
            -slope * |i + seq_len_k - seq_len_q - j| to their score, behind the soft cap; so does the
            log-sum-exp. Slopes that require grad get gradients. None: nothing.
        deterministic: equal calls give equal gradients; without it, outputs alone are promised to be equal.
        return_attn_probs: also return the log-sum-exp.

    Returns:
        out (batch, seq_len_q, n_heads, d_head_v) like q; with ``return_attn_probs`` (out, lse (batch,
        n_heads, seq_len_q) float32, an empty tensor).

    Raises:
        NotImplementedError: dropout_p together with return_attn_probs.
        and what ``flash_attention.attention`` raises.
    """
    lse = ("return_attn_probs", return_attn_probs)
    options = options_of(q, softmax_scale, causal, window_size, softcap, lse)
    options["dropout_p"] = _dropout(dropout_p, options["return_lse"])
    options["deterministic"] = checked_flag("deterministic", deterministic)
    check_unpadded(q, k, v, BATCHES)
    if alibi_slopes is not None:
        slopes = checked_slopes(alibi_slopes, q, q.shape[0])
        place = in_batches(k.shape[1] - q.shape[1])
        options["score_mod"] = alibi(slopes, place, is_ordered(options))
    return _with_probs(cut(attention(padded(q), padded(k), padded(v), **options), v))


@named_keywords
@in_words(k="kv", v="kv")
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_func`` with keys and values in one tensor, of which nothing is copied.

    Args:
        q: (batch, seq_len_q, n_heads, d_head), float16 or bfloat16.
        kv: (batch, seq_len_k, 2, n_heads_kv, d_head), of the type of q: keys, then values.
        dropout_p and all behind it: as in ``flash_attn_func``.

    Returns:
        as ``flash_attn_func``.

    Raises:
        TypeError, ValueError: kv is no tensor of this shape.
        and what ``flash_attn_func`` raises.
    """
    k, v = unpacked("kv", kv, ("batch", "seq_len_k", "2", "n_heads_kv", "d_head"), q)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


@named_keywords
@in_words(q="qkv", k="qkv", v="qkv")
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_func`` with queries, keys and values in one tensor, of which nothing is copied.

    Args:
        qkv: (batch, seq_len, 3, n_heads, d_head), float16 or bfloat16.
        dropout_p and all behind it: as in ``flash_attn_func``.

    Returns:
        as ``flash_attn_func``.

    Raises:
        TypeError, ValueError: qkv is no tensor of this shape.
        and what ``flash_attn_func`` raises.
    """
    q, k, v = unpacked("qkv", qkv, ("batch", "seq_len", "3", "n_heads", "d_head"))
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


# ---------------------------------------------------------------------- packed sequences
@named_keywords
@in_words(score_mod="alibi_slopes")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
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
        block_table: (batch, max_pages) int32: k and v are pages, (n_pages, page_size, n_heads_kv, d_head),
            and ``cu_seqlens_k`` says how many keys each sequence has. With it there is no gradient.
        dropout_p and all behind it: as in ``flash_attn_func``, within each sequence.

    Returns:
        out (total_q, n_heads, d_head_v) like q; with ``return_attn_probs`` (out, lse (n_heads, total_q)
        float32, an empty tensor).

    Raises:
        NotImplementedError: dropout_p together with return_attn_probs.
        and what ``flash_attention.attention_varlen`` raises.
    """
    lse = ("return_attn_probs", return_attn_probs)
    options = options_of(q, softmax_scale, causal, window_size, softcap, lse)
    options["dropout_p"] = _dropout(dropout_p, options["return_lse"])
    options["deterministic"] = checked_flag("deterministic", deterministic)
    check_unpadded(q, k, v, PACKED, None if block_table is None else BATCHES)
    longest = host_number("max_seqlen_q", max_seqlen_q), host_number("max_seqlen_k", max_seqlen_k)
    check_tensors({"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k})
    if block_table is not None or alibi_slopes is not None:
        check_packing(q, k, cu_seqlens_q, cu_seqlens_k, *longest)
    if block_table is not None:
        if is_readable(cu_seqlens_k):
            check_offset_values("cu_seqlens_k", cu_seqlens_k, MAX_INT32, "max_seqlen_k", longest[1])
        options |= {"seqused_k": cu_seqlens_k.diff(), "block_table": block_table}
    if alibi_slopes is not None:
        slopes = checked_slopes(alibi_slopes, q, cu_seqlens_q.numel() - 1)
        place = in_packed(cu_seqlens_q, cu_seqlens_k)
        if block_table is not None:
            check_block_table(block_table, q, cu_seqlens_q.numel() - 1)
            counts = counted(cu_seqlens_k.diff(), room_for_keys(k, None, block_table))
            place = in_items(counts, cu_seqlens_q.diff())
        options["score_mod"] = alibi(slopes, place, is_ordered(options))
    ends_k = cu_seqlens_k if block_table is None else None
    out = attention_varlen(padded(q), padded(k), padded(v), cu_seqlens_q, ends_k, *longest, **options)
    return _with_probs(cut(out, v))


@named_keywords
@in_words(k="kv", v="kv")
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_varlen_func`` with keys and values in one tensor, of which nothing is copied.

    Args:
        q: (total_q, n_heads, d_head), float16 or bfloat16.
        kv: (total_k, 2, n_heads_kv, d_head), of the type of q: keys, then values.
        cu_seqlens_q and all behind it: as in ``flash_attn_varlen_func``.

    Returns:
        as ``flash_attn_varlen_func``.

    Raises:
        TypeError, ValueError: kv is no tensor of this shape.
        and what ``flash_attn_varlen_func`` raises.
    """
    k, v = unpacked("kv", kv, ("total_k", "2", "n_heads_kv", "d_head"), q)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@named_keywords
@in_words(
    q="qkv", k="qkv", v="qkv", cu_seqlens_q="cu_seqlens", cu_seqlens_k="cu_seqlens",
    max_seqlen_q="max_seqlen", max_seqlen_k="max_seqlen",
)  # fmt: skip
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_varlen_func`` with queries, keys and values in one tensor, of which nothing is copied.

    Args:
        qkv: (total, 3, n_heads, d_head), float16 or bfloat16.
        cu_seqlens: (batch + 1,) int32 on the device of qkv: 0, then the end of each sequence.
        max_seqlen: the most rows of one sequence.
        dropout_p and all behind it: as in ``flash_attn_varlen_func``.

    Returns:
        as ``flash_attn_varlen_func``.

    Raises:
        TypeError, ValueError: qkv is no tensor of this shape.
        and what ``flash_attn_varlen_func`` raises.
    """
    q, k, v = unpacked("qkv", qkv, ("total", "3", "n_heads", "d_head"))
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


# ---------------------------------------------------------------------- a cache
@named_keywords
@in_words(score_mod="alibi_slopes")
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Attention to a cache of keys and values, after k and v are appended to it in place.

    No length is read on the host, so that all lengths and tables may change between replays of a CUDA graph.
    Kernels follow ``block_table`` and ``cache_batch_idx`` themselves.

    Args:
        q: (batch, seq_len_q, n_heads, d_head), float16 or bfloat16.
        k_cache: (batch_cache, capacity, n_heads_kv, d_head), of the type of q, with at least as many items as
            q; with ``block_table`` (n_pages, page_size, n_heads_kv, d_head), pages of any size. Where k is
            appended, no elements of the caches may share memory.
        v_cache: like k_cache.
        k: (batch, seq_len_new, n_heads_kv, d_head), of the cache's type, appended behind ``cache_seqlens``.
            There must be room, and item and page must be there, which on a CUDA device is not checked before
            the launch: what is not there is an error of the device.
        v: like k.
        rotary_cos: (seq_len_rotary, d_rotary / 2), applied to q and k at their positions.
        rotary_sin: like rotary_cos.
        cache_seqlens: keys in the cache before the call, (batch,) int32 or one int; None: the capacity.
        cache_batch_idx: (batch,) int32 or int64, the item of the cache, or the row of ``block_table``, for
            each batch item; None: the first.
        cache_leftpad: (batch,) int32, rows of padding before each item's first key, which ``cache_seqlens``
            counts, too; the rows of the caches then follow each other.
        block_table: (batch, max_pages) int32, the pages of each batch item.
        rotary_interleaved: rotate neighbouring columns; else column i and i + d_rotary / 2.
        num_splits: parts that the keys are cut into; 0: the library chooses their number.
        alibi_slopes: as in ``flash_attn_func``; on a GPU not together with cache_leftpad, num_splits, or
            block_table and cache_batch_idx at once.
        return_softmax_lse: also return the log-sum-exp.
        softmax_scale, causal, window_size, softcap: as in ``flash_attn_func``.

    Returns:
        out like q; with ``return_softmax_lse`` (out, lse (batch, n_heads, seq_len_q) float32).

    Raises:
        ValueError, TypeError: arguments that do not fit each other; what ``attention`` raises.
    """
    n_splits = parts_of(num_splits)
    lse = ("return_softmax_lse", return_softmax_lse)
    both = block_table is not None and cache_batch_idx is not None
    if cache_leftpad is not None or n_splits is not None or both:
        return attend_packed_cache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            block_table=block_table,
            rotary=Rotary(rotary_cos, rotary_sin, checked_flag("rotary_interleaved", rotary_interleaved)),
            alibi_slopes=alibi_slopes,
            n_splits=n_splits,
            options=options_of(q, softmax_scale, causal, window_size, softcap, lse),
        )
    return attend_with_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary=None if rotary_cos is None and rotary_sin is None else (rotary_cos, rotary_sin),
        rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
        options=options_of(q, softmax_scale, causal, window_size, softcap, lse),
    )


# ---------------------------------------------------------------------- between the two libraries' words
def _dropout(dropout_p: float, return_attn_probs: bool) -> float:
    """The probability, checked."""
    p = checked_dropout(dropout_p)
    if p and return_attn_probs:
        raise NotImplementedError(
            f"dropout_p is {p}, and return_attn_probs is True: which weights are dropped would be the third "
            "result, and nobody writes them: pass return_attn_probs=False"
        )
    return p


def _with_probs(result: Result) -> Result:
    if not isinstance(result, tuple):
        return result
    out, lse = result
    return out, lse, out.new_empty(0)
