"""Modules with the names of FlashAttention-3 and -4 whose functions are this library's, for their own tests.

Arguments that say how to compute (splits of keys, packed groups, SMs to spare) are dropped. Those
that ask for more are refused by name, as the library's own functions refuse them.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from flash_attn_module import module_of
from torch import Tensor

from flash_attention import attention, attention_varlen, flash_attn_interface

NO_WINDOW = (-1, -1)


def install_3(tests: Path) -> None:
    """``flash_attn_interface``, and the helpers beside FlashAttention-3's tests."""
    sys.path.insert(0, str(tests.parent))
    module_of(
        "flash_attn_interface",
        flash_attn_func=func_3,
        flash_attn_varlen_func=varlen_func_3,
        flash_attn_combine=_missing("flash_attn_combine"),
        flash_attn_with_kvcache=_missing("flash_attn_with_kvcache"),
        get_scheduler_metadata=_missing("get_scheduler_metadata"),
    )


def install_4(tests: Path) -> None:
    """``flash_attn.cute``: its interface, and of the sources around the tests the helpers of the tests."""
    module_of("flash_attn")
    module_of("flash_attn.cute")
    module_of("flash_attn.cute.cache_utils", JITCache=dict)
    names = ("_flash_attn_fwd", "_flash_attn_bwd", "_flash_attn_bwd_sparse_mla", "flash_attn_combine")
    module_of(
        "flash_attn.cute.interface",
        flash_attn_func=func_4,
        flash_attn_varlen_func=varlen_func_4,
        get_scheduler_metadata=_missing("get_scheduler_metadata"),
        **{name: _missing(name) for name in names},
    )
    sources = next(folder for folder in tests.parents if (folder / "flash_attn" / "cute").is_dir())
    _load("flash_attn.cute.testing", sources / "flash_attn" / "cute" / "testing.py")


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _missing(name: str) -> Any:
    def refuse(*unused: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{name} is not one of this library's names")

    return refuse


def _refuse(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name} is given; this library has no such argument")


def _used(name: str, used: Tensor | None, offsets: Tensor | None) -> dict[str, Any]:
    """What is to be refused: lengths that say something else than the offsets."""
    whole = used is not None and offsets is not None and bool((used == offsets.diff()).all())
    return {name: None if whole else used}


# ---------------------------------------------------------------------- FlashAttention-3
def func_3(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: Any = NO_WINDOW, attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """``flash_attn_func`` of FlashAttention-3."""
    _refuse({"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale})
    _refuse({"attention_chunk": attention_chunk or None})
    return flash_attn_interface.flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=tuple(map(int, window_size)),
        softcap=softcap, deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def varlen_func_3(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: Any = NO_WINDOW, attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
) -> Any:  # fmt: skip
    """``flash_attn_varlen_func`` of FlashAttention-3."""
    _refuse({"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale})
    _refuse(_used("seqused_q", seqused_q, cu_seqlens_q) | _used("seqused_k", seqused_k, cu_seqlens_k))
    _refuse({"attention_chunk": attention_chunk or None})
    return flash_attn_interface.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k),
        softmax_scale=softmax_scale, causal=causal, window_size=tuple(map(int, window_size)),
        softcap=softcap, deterministic=deterministic,
    )  # fmt: skip


# ---------------------------------------------------------------------- FlashAttention-4
def _other_sinks(q: Tensor, sinks: Tensor | None) -> dict[str, Any]:
    """What is to be refused: sinks of another type than float32 and that of q."""
    taken = sinks is None or sinks.dtype in (torch.float32, q.dtype)
    return {} if taken else {"learnable_sink": sinks}


def func_4(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, return_lse: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``flash_attn_func`` of FlashAttention-4: output and LSE."""
    _refuse({"qv": qv, **_other_sinks(q, learnable_sink)})
    return attention(
        q, k, v, causal=causal, softmax_scale=softmax_scale, window=window_size, softcap=softcap,
        sinks=learnable_sink, deterministic=deterministic, return_lse=True,
    )  # fmt: skip


def varlen_func_4(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    return_lse: bool = False, **further: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``flash_attn_varlen_func`` of FlashAttention-4."""
    _refuse(_used("seqused_q", seqused_q, cu_seqlens_q) | _used("seqused_k", seqused_k, cu_seqlens_k))
    _refuse({**_other_sinks(q, learnable_sink), **further})
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets is None:
            raise NotImplementedError(f"{name} is missing; both sides are packed, or neither")
    longest = (
        q.shape[0] if max_seqlen_q is None else max_seqlen_q,
        k.shape[0] if max_seqlen_k is None else max_seqlen_k,
    )
    return attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, *map(int, longest), causal=causal, softmax_scale=softmax_scale,
        window=window_size, softcap=softcap, sinks=learnable_sink, deterministic=deterministic,
        return_lse=True,
    )  # fmt: skip
