"""A module with the names of FlashAttention-4 whose functions are this library's, for its own tests.

Arguments that say how to compute (splits of keys, packed groups, a schedule made before) are dropped. Those
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

from flash_attention import attention, attention_varlen


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
        get_scheduler_metadata=PlannedByTheLibrary,
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


class PlannedByTheLibrary:
    """What the caller hands on as ``scheduler_metadata``, which says how to compute: it has no parts."""

    def __init__(self, **sizes: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"{name} of scheduler_metadata: the library plans its work itself")


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
    softcap: float = 0.0, scheduler_metadata: PlannedByTheLibrary | None = None, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, return_lse: bool = False, **further: Any,
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
