"""Keywords that a function does not have, with the name that it has for what they mean elsewhere."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# One meaning a row: its names here, in PyTorch, in flash-attn and in other libraries.
MEANINGS = (
    ("q", "query", "Q"),
    ("k", "key", "K"),
    ("v", "value", "V"),
    ("causal", "is_causal"),
    ("softmax_scale", "scale", "sm_scale", "scaling"),
    ("window", "window_size", "sliding_window", "local_window_size"),
    ("softcap", "logits_soft_cap", "soft_cap", "logit_cap"),
    ("sinks", "s_aux", "learnable_sink", "sink"),
    ("return_lse", "return_softmax_lse", "return_attn_probs", "return_softmax"),
    ("out", "o", "output"),
    ("config", "kernel_cfg"),
    ("backward_config",),
    ("seqused_k", "cache_seqlens", "kv_seqlens"),
    ("block_table", "block_tables", "page_table"),
    ("cu_seqlens_q", "cu_seqlens"),
    ("max_seqlen_q", "max_seqlen"),
    ("enable_gqa",),
    ("dropout_p", "dropout"),
    ("attn_mask", "mask"),
    ("attention_mask", "key_padding_mask"),
    ("alibi_slopes",),
    ("attn_bias", "bias", "position_bias"),
    ("score_mod", "score_modifier"),
    ("mask_mod", "mask_function", "block_mask"),
    ("q_descale", "k_descale", "v_descale", "descale_q", "descale_k", "descale_v"),
    ("pack_gqa", "sm_margin", "scheduler_metadata"),
    ("n_splits", "num_splits"),
    ("cache_leftpad", "cache_batch_idx"),
    ("layout", "tensor_layout", "qkv_layout", "input_layout"),
)

# What a function may lack, and what to do then. ``{names}`` are those that the call has.
ADVICE = {
    "dropout_p": "flash_attention.attention(…, dropout_p=…) drops weights",
    "dropout": "flash_attention.attention(…, dropout_p=…) drops weights",
    "alibi_slopes": "the functions by flash-attn's names take them (flash_attn_interface.flash_attn_func); "
    "else a score_mod adds the bias",
    "attn_bias": "there is no such bias of scores; a score_mod adds one (flash_attention.mods.dense_bias)",
    "score_mod": "flash_attention.attention(…, score_mod=…) takes such a function",
    "mask_mod": "flash_attention.attention(…, mask_mod=…) takes such a function",
    "attn_mask": "causal and window say which keys are visible, attention_varlen takes padded batches "
    "without their padding, and flash_attention.mods.dense_mask makes a mask_mod of a tensor",
    "attention_mask": "attention_varlen takes batches without padding, and flash_attention.mods.dense_mask "
    "makes a mask_mod of a tensor",
    "enable_gqa": "heads are shared without asking where those of q are a multiple of those of k and v",
    "deterministic": "leave it out: equal calls give equal bits, as far as no gradient is computed",
    "q_descale": "there is no 8-bit type to scale: convert the tensors to float16 or bfloat16",
    "pack_gqa": "leave it out: it changes no result, and the library chooses how a kernel runs",
    "layout": "the shapes are those of the arguments' description: transpose what has another order",
    "window": "flash_attention.attention(…, window=…) takes a window",
    "softcap": "flash_attention.attention(…, softcap=…) takes a cap",
    "return_lse": "flash_attention.attention(…, return_lse=True) returns it",
    "n_splits": "leave it out: the library chooses how many parts the keys are cut into",
    "numerics": "flash_attention.attention and attention_varlen(…, numerics=…) ask for the same bits in each "
    "call",
    "attention_chunk": "the functions of flash_attention.integrations.flash_attn_3 take it; else a mask_mod "
    "hides the keys of other chunks",
    "cache_leftpad": "flash_attention.integrations.flash_attn_3.flash_attn_with_kvcache takes it",
    "cu_seqlens_q": "flash_attention.attention_varlen takes packed sequences",
    "cu_seqlens_k": "flash_attention.attention_varlen takes packed sequences",
    "seqused_q": "flash_attention.attention_varlen(…, seqused_q=…) takes how many queries count",
    "seqused_k": "flash_attention.attention_varlen takes a cache of keys, for packed queries; "
    "flash_attention.cached.attention_cached for batches",
    "block_table": "flash_attention.attention_varlen takes a cache of keys in pages, for packed queries; "
    "flash_attention.cached.attention_cached for batches",
    "config": "flash_attention.attention(…, config=…) takes a configuration",
    "backward_config": "flash_attention.attention(…, backward_config=…) takes one of the gradients",
    "sinks": "flash_attention.attention and attention_varlen(…, sinks=…) take sinks",
    "out": "flash_attention.attention and attention_varlen(…, out=…) write into a tensor",
}


def unknown_keyword(function: str, names: Iterable[str], allowed: Iterable[str]) -> TypeError:
    """The error for keywords that a function does not have.

    Args:
        function: its name.
        names: what it was given.
        allowed: what it takes.
    """
    name, takes = next(iter(names)), list(allowed)
    row = next((row for row in MEANINGS if name in row), (name,))
    ours = [other for other in row if other in takes]
    if ours:
        advice = f"its name here is {ours[0]}"
    elif known := [ADVICE[other] for other in (name, *row) if other in ADVICE]:
        advice = known[0]
    elif alike := difflib.get_close_matches(name, takes, n=1):
        advice = f"did you mean {alike[0]}?"
    else:
        advice = "none of its own is known to mean that"
    end = "" if advice.endswith("?") else "."
    return TypeError(f"{function} has no argument {name}: {advice}{end} It takes {', '.join(takes)}")


def parameters(function: Callable[..., object]) -> list[str]:
    """Names of a function's arguments, without what takes the unknown ones."""
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]


def named_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which now says what its arguments are called when it is given others."""
    takes = parameters(function)
    known = frozenset(takes)

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        if not known.issuperset(keywords):
            raise unknown_keyword(function.__name__, (n for n in keywords if n not in known), takes)
        return function(*args, **keywords)

    return call
