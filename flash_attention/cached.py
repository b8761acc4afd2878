"""Attention over keys of which each batch item has used only the first so many, as in a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flash_attention.call import shifted
from flash_attention.checks.keywords import parameters, unknown_keyword
from flash_attention.checks.options import (
    checked_dropout,
    checked_factors,
    checked_numerics,
    checked_sms,
    checked_window,
)
from flash_attention.layouts import Cached
from flash_attention.options import NO_DROPOUT, NO_OFFSET, NO_SOFTCAP, MaskMod, Options, ScoreMod
from flash_attention.run import eager, launch_cache, torch_ops
from flash_attention.run.eager import Result
from flash_attention.run.launch_cache import Key
from flash_attention.run.tracing import traced
from flash_helpers.kernels.kernel import BackwardConfig, ForwardConfig
from flash_helpers.kernels.problem import UNLIMITED, Window

if TYPE_CHECKING:
    from typing_extensions import Never


def attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: Tensor,
    *,
    block_table: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window = UNLIMITED,
    softcap: float = NO_SOFTCAP,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    config: ForwardConfig | None = None,
    backend: str | None = None,
    diagonal_offset: int = NO_OFFSET,
    out_dtype: torch.dtype | None = None,
    n_sms: int | None = None,
    deterministic: bool = False,
    backward_config: BackwardConfig | None = None,
    validate: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    dropout_p: float = NO_DROPOUT,
    dropout_seed: Tensor | None = None,
    numerics: str | None = None,
    **unknown: Never,
) -> Result:
    """``attention`` where batch item b has the keys ``k[b, :seqused_k[b]]`` and no more.

    Counts and pages stay on the device: they may change between replays of a CUDA graph. Kernel and number
    of parts are chosen for the capacity, ``k.shape[1]`` or, in pages, all that a row of the table can name.
    Keys in pages have no gradient; keys behind those that are used get 0.

    Args:
        q: (batch, seq_len_q, n_heads, d_head).
        k: (batch, capacity, n_heads_kv, d_head); with ``block_table`` (n_pages, page_size, n_heads_kv,
            d_head).
        v: (batch, capacity, n_heads_kv, d_head_v), or in pages as k.
        seqused_k: (batch,) int32 on the device of q; counts beyond the capacity are cut down to it.
        block_table: (batch, max_pages) int32 on the device of q: key j of item b is row ``j % page_size`` of
            page ``block_table[b, j // page_size]``. Entries behind an item's last key may hold anything.
            Others that name no page are refused on the CPU; on a GPU, whose host does not read them, that
            item's result means nothing.
        validate: read the pages that hold keys and refuse wrong ones, which waits for the device. On the CPU
            they are always read.
        causal, softmax_scale, window, softcap, sinks, return_lse, out, config, backend, diagonal_offset,
            out_dtype, n_sms, deterministic, backward_config, score_mod, mask_mod, dropout_p, dropout_seed,
            numerics: as in ``attention``, with ``seqused_k[b]`` in place of seq_len_k.

    Returns:
        as ``attention``.

    Raises:
        as ``attention``.
    """
    if unknown:
        raise unknown_keyword("attention_cached", unknown, parameters(attention_cached))
    if diagonal_offset is not NO_OFFSET:
        causal, window = shifted(causal, window, diagonal_offset)
    if dropout_p is not NO_DROPOUT:
        dropout_p = checked_dropout(dropout_p)
    at_once = not traced()
    key: Key | None = None
    mods: launch_cache.Mods | None = launch_cache.NO_MODS
    if at_once and (score_mod is not None or mask_mod is not None):
        mods = launch_cache.mods_of(score_mod, mask_mod)
    if numerics is not None:
        numerics = checked_numerics(numerics)
    if at_once and mods is not None and not dropout_p:
        if window is not UNLIMITED:
            window = checked_window(window)
        if (softcap is not NO_SOFTCAP or softmax_scale is not None) and not (
            type(softcap) is float and (softmax_scale is None or type(softmax_scale) is float)
        ):
            softmax_scale, softcap = checked_factors(softmax_scale, softcap)
        if validate is False:
            name = "attention_cached"
            key = (name, causal, softmax_scale, window, softcap, return_lse)
            plain = config is None and backend is None and out_dtype is None and backward_config is None
            if not (plain and n_sms is None and numerics is None and deterministic is False):
                n_sms = checked_sms(n_sms)
                key += (None if config is None else id(config), backend, out_dtype, n_sms, deterministic)
                key += (None if backward_config is None else id(backward_config), numerics)
            key += mods[0]
            held = (None, None, seqused_k, block_table, None)
            result = launch_cache.repeat(key, q, k, v, out, sinks, *held, *mods[1])
            if result is not None:
                return result
    rare = out_dtype, n_sms, deterministic, backward_config, score_mod, mask_mod, dropout_p, dropout_seed
    basic = causal, softmax_scale, window, softcap, sinks, return_lse, out, config, backend
    options = Options(*basic, *rare, numerics)
    layout = Cached(seqused_k, block_table, validate)
    if at_once:
        result = eager.attend(q, k, v, layout, options, key, mods)
        if result is not None:
            return result
    return torch_ops.call(q, k, v, layout, options)
