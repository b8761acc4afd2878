"""Calls of the functions that others name: for each, arguments that it takes, and what each argument does.

A function's table says for each of its parameters a value beside the usual one, and what comes of it:

``changes``      the result, or what the call writes, is another one
``written``      the result is this tensor, with what is given without it
``refused``      an error names the argument
``of no weight`` the result has the same bits: the function's text says that it is of no influence
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attention import flash_attn_interface as flash_attn_2
from flash_attention import sdpa
from flash_attention.flex_attention import flex_attention
from flash_attention.integrations import flash_attn_3, flashinfer, vllm
from flash_attention.scaled_dot_product import flash_attention_operator

HEADS, HEADS_KV, D = 4, 2, 32
Arguments = dict[str, Any]
CHANGES, WRITTEN, REFUSED, NO_WEIGHT = "changes", "written", "refused", "of no weight"


class Foreign(NamedTuple):
    """A function with one way of calling it.

    Attributes:
        function: the function.
        arguments: makes what it takes, the same in each call.
        table: by parameter, another value, or what makes one of the arguments and the name, and what comes of
            it.
    """

    function: Callable[..., Any]
    arguments: Callable[[], Arguments]
    table: dict[str, tuple[Any, str]]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def pages_of(n: int) -> Tensor:
    return torch.arange(2 * n, dtype=torch.int32).view(2, n)


def plus(amount: float) -> Callable[[Arguments, str], Any]:
    """The argument as it is, with this added."""
    return lambda arguments, name: arguments[name] + amount


# ---------------------------------------------------------------------- arguments
def batch() -> Arguments:
    return {
        "q": random(2, 6, HEADS, D), "k": random(2, 11, HEADS_KV, D), "v": random(2, 11, HEADS_KV, D, seed=1)
    }  # fmt: skip


def heads_first() -> Arguments:
    names = zip(("query", "key", "value"), batch().values(), strict=True)
    return {name: x.repeat_interleave(HEADS // x.shape[2], 2).transpose(1, 2) for name, x in names}


def packed() -> Arguments:
    ends = {"cu_seqlens_q": ints(0, 6, 8), "cu_seqlens_k": ints(0, 3, 14)}
    rows = {"q": random(8, HEADS, D), "k": random(14, HEADS_KV, D), "v": random(14, HEADS_KV, D, seed=1)}
    return {**rows, **ends, "max_seqlen_q": 6, "max_seqlen_k": 11}


def packed_over_pages() -> Arguments:
    pages = {"k": random(8, 16, HEADS_KV, D), "v": random(8, 16, HEADS_KV, D, seed=1)}
    return {**packed(), **pages, "max_seqlen_k": 64, "block_table": pages_of(4)}


def tables() -> Arguments:
    angles = torch.arange(60)[:, None] * 10.0 ** -torch.arange(8)
    return {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}


def cache() -> Arguments:
    caches = {"k_cache": random(3, 48, HEADS_KV, D), "v_cache": random(3, 48, HEADS_KV, D, seed=1)}
    new = {"k": random(2, 3, HEADS_KV, D, seed=2), "v": random(2, 3, HEADS_KV, D, seed=3)}
    return {"q": random(2, 3, HEADS, D), **caches, **new, **tables(), "cache_seqlens": ints(5, 17)}


def packed_cache() -> Arguments:
    new = {"k": random(5, HEADS_KV, D, seed=2), "v": random(5, HEADS_KV, D, seed=3)}
    ends = {"cu_seqlens_q": ints(0, 6, 8), "max_seqlen_q": 6, "cu_seqlens_k_new": ints(0, 2, 5)}
    return {**cache(), **new, **ends, "q": random(8, HEADS, D), "rotary_seqlens": ints(0, 3)}


def vllm_packed() -> Arguments:
    scales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), torch.ones(1).expand(2, HEADS_KV))
    return {
        **packed(),
        **scales,
        "causal": True,
        "s_aux": random(HEADS),
        "out": torch.zeros(8, HEADS, D).bfloat16(),
    }


def vllm_pages() -> Arguments:
    given = packed_over_pages() | {"seqused_k": ints(9, 33)}
    del given["cu_seqlens_k"]
    return given


def vllm_odd_heads() -> Arguments:
    rows = {"q": random(8, HEADS, 59), "k": random(14, HEADS_KV, 59), "v": random(14, HEADS_KV, 59, seed=1)}
    return {**packed(), **rows, "out": torch.zeros(8, HEADS, 59).bfloat16()}


def parts() -> Arguments:
    return {
        "out_partial": random(2, 2, 5, HEADS, D, dtype=torch.float32),
        "lse_partial": random(2, 2, 5, HEADS, dtype=torch.float32),
    }


def two_states() -> Arguments:
    lse = random(6, HEADS, dtype=torch.float32)
    return {"v_a": random(6, HEADS, D), "s_a": lse, "v_b": random(6, HEADS, D, seed=1), "s_b": lse + 1}


def states() -> Arguments:
    return {"v": random(6, 2, HEADS, D), "s": random(6, 2, HEADS, dtype=torch.float32)}


def states_in_place() -> Arguments:
    names = dict(zip(("v", "s", "v_other", "s_other"), two_states().values(), strict=True))
    return {**names, "mask": torch.arange(6) % 2 == 0}


# ---------------------------------------------------------------------- what arguments do
SCALES = torch.ones(1)
COMMON: dict[str, tuple[Any, str]] = {
    "softmax_scale": (0.7, CHANGES), "causal": (True, CHANGES), "window_size": ((2, 1), CHANGES),
    "softcap": (1.5, CHANGES),
}  # fmt: skip
LSE = {"return_attn_probs": (True, CHANGES)}
ROWS = dict.fromkeys(("q", "k", "v"), (plus(1), CHANGES))
ENDS = {
    "cu_seqlens_q": (ints(0, 5, 8), CHANGES), "cu_seqlens_k": (ints(0, 4, 14), CHANGES),
    "max_seqlen_q": (5, REFUSED), "max_seqlen_k": (10, REFUSED),
}  # fmt: skip
OF_2 = {
    **COMMON, **LSE, "dropout_p": (0.5, CHANGES), "alibi_slopes": (torch.ones(HEADS), CHANGES),
    "deterministic": (True, NO_WEIGHT),
}  # fmt: skip
SCALES_REFUSED = dict.fromkeys(("q_descale", "k_descale", "v_descale"), (SCALES, REFUSED))
OF_3 = {
    **COMMON, **LSE, **SCALES_REFUSED, "qv": (SCALES, REFUSED), "attention_chunk": (4, CHANGES),
    "num_splits": (3, NO_WEIGHT), "pack_gqa": (True, NO_WEIGHT), "deterministic": (True, NO_WEIGHT),
    "sm_margin": (8, REFUSED),
}  # fmt: skip
OF_3_PACKED = {name: what for name, what in OF_3.items() if name not in ("qv", "num_splits", "pack_gqa")}
OF_3_PACKED |= {"qkv": (plus(1), CHANGES)}
OF_A_CACHE: dict[str, tuple[Any, str]] = {
    **COMMON, **dict.fromkeys(("q", "k_cache", "v_cache", "k", "v"), (plus(1), CHANGES)),
    **dict.fromkeys(("rotary_cos", "rotary_sin"), (plus(1), CHANGES)),
    "cache_seqlens": (ints(6, 17), CHANGES),
    "cache_batch_idx": (ints(2, 0), CHANGES), "cache_leftpad": (ints(1, 4), CHANGES),
    "rotary_interleaved": (False, CHANGES), "return_softmax_lse": (True, CHANGES),
}  # fmt: skip
PAGES_OF_THE_CACHE = torch.tensor([[1], [2]], dtype=torch.int32)
IDLE_SCALES = dict.fromkeys(
    ("q_descale", "k_descale", "v_descale"), (torch.full((2, HEADS_KV), 0.5), NO_WEIGHT)
)
OF_VLLM = {
    **COMMON, **ROWS, **IDLE_SCALES, "q_v": (SCALES, REFUSED), "dropout_p": (0.5, REFUSED),
    "return_attn_probs": (True, NO_WEIGHT),
    "alibi_slopes": (torch.ones(HEADS), CHANGES), "deterministic": (True, NO_WEIGHT),
    "return_softmax_lse": (True, CHANGES), "scheduler_metadata": (SCALES, REFUSED),
    "num_splits": (300, REFUSED), "fa_version": (3, NO_WEIGHT), "s_aux": (plus(3), CHANGES),
    "cp_world_size": (2, REFUSED), "cp_rank": (1, REFUSED), "cp_tot_seqused_k": (SCALES, REFUSED),
    "output_scale": (SCALES, REFUSED), "mask_mod": (lambda *places: True, REFUSED),
    "block_sparse_tensors": ((SCALES,), REFUSED), "aux_tensors": ([SCALES], REFUSED),
    "aux_tensor_leading_dims": ([0], REFUSED), "dynamic_causal": (ints(1, 0), REFUSED),
}  # fmt: skip
OF_PYTORCH = dict.fromkeys(("query", "key", "value"), (plus(1), CHANGES)) | {
    "scale": (0.7, CHANGES), "enable_gqa": (True, NO_WEIGHT),
}  # fmt: skip


FOREIGN: dict[str, Foreign] = {
    "flash-attn 2: func": Foreign(flash_attn_2.flash_attn_func, batch, {**OF_2, **ROWS}),
    "flash-attn 2: kvpacked": Foreign(
        flash_attn_2.flash_attn_kvpacked_func,
        lambda: {"q": batch()["q"], "kv": random(2, 11, 2, HEADS_KV, D)},
        {**OF_2, "q": (plus(1), CHANGES), "kv": (plus(1), CHANGES)},
    ),
    "flash-attn 2: qkvpacked": Foreign(
        flash_attn_2.flash_attn_qkvpacked_func,
        lambda: {"qkv": random(2, 11, 3, HEADS, D)},
        {**OF_2, "qkv": (plus(1), CHANGES)},
    ),
    "flash-attn 2: varlen": Foreign(
        flash_attn_2.flash_attn_varlen_func,
        packed,
        {**OF_2, **ROWS, **ENDS, "block_table": (pages_of(1), REFUSED)},
    ),
    "flash-attn 2: varlen over pages": Foreign(
        flash_attn_2.flash_attn_varlen_func,
        packed_over_pages,
        {**OF_2, **ROWS, **ENDS, "dropout_p": (1.5, REFUSED), "block_table": (pages_of(4).flip(1), CHANGES)},
    ),
    "flash-attn 2: varlen kvpacked": Foreign(
        flash_attn_2.flash_attn_varlen_kvpacked_func,
        lambda: {n: x for n, x in packed().items() if n not in "kv"} | {"kv": random(14, 2, HEADS_KV, D)},
        {**OF_2, **ENDS, "q": (plus(1), CHANGES), "kv": (plus(1), CHANGES)},
    ),
    "flash-attn 2: varlen qkvpacked": Foreign(
        flash_attn_2.flash_attn_varlen_qkvpacked_func,
        lambda: {"qkv": random(14, 3, HEADS, D), "cu_seqlens": ints(0, 3, 14), "max_seqlen": 11},
        {
            **OF_2,
            "qkv": (plus(1), CHANGES),
            "cu_seqlens": (ints(0, 4, 14), CHANGES),
            "max_seqlen": (10, REFUSED),
        },
    ),
    "flash-attn 2: cache": Foreign(
        flash_attn_2.flash_attn_with_kvcache,
        cache,
        {
            **OF_A_CACHE,
            "block_table": (PAGES_OF_THE_CACHE, CHANGES),
            "alibi_slopes": (torch.ones(HEADS), CHANGES),
            "num_splits": (300, REFUSED),
        },
    ),
    "flash-attn 3: func": Foreign(flash_attn_3.flash_attn_func, batch, {**OF_3, **ROWS}),
    "flash-attn 3: qkvpacked": Foreign(
        flash_attn_3.flash_attn_qkvpacked_func,
        lambda: {"qkv": random(2, 11, 3, HEADS, D)},
        OF_3_PACKED | {"num_heads_q": (2, REFUSED)},
    ),
    "flash-attn 3: qkvpacked, grouped": Foreign(
        flash_attn_3.flash_attn_qkvpacked_func,
        lambda: {"qkv": random(2, 11, HEADS + 2 * HEADS_KV, D), "num_heads_q": HEADS},
        OF_3_PACKED | {"num_heads_q": (HEADS - 1, REFUSED)},
    ),
    "flash-attn 3: varlen": Foreign(
        flash_attn_3.flash_attn_varlen_func,
        packed,
        {**OF_3, **ROWS, **ENDS, "seqused_q": (ints(4, 1), CHANGES), "seqused_k": (ints(3, 7), CHANGES)},
    ),
    "flash-attn 3: cache": Foreign(
        flash_attn_3.flash_attn_with_kvcache,
        cache,
        {
            **OF_3,
            **OF_A_CACHE,
            "page_table": (PAGES_OF_THE_CACHE, CHANGES),
            "cu_seqlens_q": (ints(0, 3, 6), REFUSED),
            "cu_seqlens_k_new": (ints(0, 3, 6), REFUSED),
            "max_seqlen_q": (2, REFUSED),
            "rotary_seqlens": (ints(0, 3), CHANGES),
            "scheduler_metadata": (SCALES, REFUSED),
            "num_splits": (300, REFUSED),
        },
    ),
    "flash-attn 3: packed cache": Foreign(
        flash_attn_3.flash_attn_with_kvcache,
        packed_cache,
        {
            **OF_3,
            **OF_A_CACHE,
            "page_table": (PAGES_OF_THE_CACHE, CHANGES),
            "cu_seqlens_q": (ints(0, 5, 8), CHANGES),
            "cu_seqlens_k_new": (ints(0, 3, 5), CHANGES),
            "max_seqlen_q": (5, REFUSED),
            "rotary_seqlens": (ints(0, 4), CHANGES),
            "scheduler_metadata": (SCALES, REFUSED),
            "num_splits": (300, REFUSED),
        },
    ),
    "flash-attn 3: combine": Foreign(
        flash_attn_3.flash_attn_combine,
        parts,
        {
            "out_partial": (plus(1), CHANGES),
            "lse_partial": (lambda a, n: a[n].flip(0), CHANGES),
            "out": (torch.zeros(2, 5, HEADS, D), WRITTEN),
            "out_dtype": (torch.bfloat16, CHANGES),
        },
    ),
    "vLLM: packed": Foreign(
        vllm.flash_attn_varlen_func,
        vllm_packed,
        {
            **OF_VLLM,
            **ENDS,
            "causal": (False, CHANGES),
            "seqused_k": (ints(3, 7), CHANGES),
            "block_table": (pages_of(1), REFUSED),
            "out": (plus(0), WRITTEN),
        },
    ),
    "vLLM: pages": Foreign(
        vllm.flash_attn_varlen_func,
        vllm_pages,
        {
            **OF_VLLM,
            **ENDS,
            "cu_seqlens_k": (ints(0, 4, 14), REFUSED),
            "seqused_k": (ints(3, 7), CHANGES),
            "s_aux": (random(HEADS), CHANGES),
            "block_table": (pages_of(4).flip(1), CHANGES),
            "out": (torch.zeros(8, HEADS, D).bfloat16(), WRITTEN),
        },
    ),
    "vLLM: odd head sizes": Foreign(
        vllm.flash_attn_varlen_func,
        vllm_odd_heads,
        {
            **OF_VLLM,
            **ENDS,
            "seqused_k": (ints(3, 7), CHANGES),
            "s_aux": (random(HEADS), CHANGES),
            "block_table": (pages_of(1), REFUSED),
            "out": (plus(0), WRITTEN),
        },
    ),
    "FlashInfer: merge_state": Foreign(
        flashinfer.merge_state, two_states, dict.fromkeys(("v_a", "s_a", "v_b", "s_b"), (plus(1), CHANGES))
    ),
    "FlashInfer: merge_states": Foreign(
        flashinfer.merge_states, states, dict.fromkeys(("v", "s"), (plus(1), CHANGES))
    ),
    "FlashInfer: merge_state_in_place": Foreign(
        flashinfer.merge_state_in_place,
        states_in_place,
        dict.fromkeys(("v", "s", "v_other", "s_other"), (plus(1), CHANGES)) | {"mask": (None, CHANGES)},
    ),
    "PyTorch: sdpa": Foreign(
        sdpa,
        heads_first,
        {
            **OF_PYTORCH,
            "attn_mask": (random(6, 11), CHANGES),
            "dropout_p": (0.5, CHANGES),
            "is_causal": (True, CHANGES),
        },
    ),
    "PyTorch: flex_attention": Foreign(
        flex_attention,
        heads_first,
        {
            **OF_PYTORCH,
            "score_mod": (lambda a, n: lambda score, b, h, q, k: score + k, CHANGES),
            "block_mask": (lambda a, n: lambda b, h, q, k: q >= k, CHANGES),
            "return_lse": (True, CHANGES),
            "kernel_options": ({"BLOCK_M": 64}, REFUSED),
            "return_aux": ("lse", REFUSED),
        },
    ),
    "PyTorch: operator": Foreign(
        flash_attention_operator,
        heads_first,
        {name: what for name, what in OF_PYTORCH.items() if name != "enable_gqa"}
        | {"dropout_p": (0.5, REFUSED), "is_causal": (True, CHANGES), "return_debug_mask": (True, REFUSED)},
    ),
}
