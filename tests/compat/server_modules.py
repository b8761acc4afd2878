"""Modules named as flash-attn 3's and vLLM's whose functions are this library's, for their own tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from flash_attn_module import install, module_of
from torch import Tensor

from flash_attention.integrations import flash_attn_3, vllm


def install_3(tests: Path, without: tuple[str, ...] = ()) -> None:
    """``flash_attn_interface`` of flash-attn 3, and the helpers of its tests.

    Args:
        without: what its tests are to leave out: ``FP8``, ``BACKWARD``.
    """
    install()
    for switch in ("FP8", "BACKWARD"):  # read while the test file is loaded
        os.environ[f"FLASH_ATTENTION_DISABLE_{switch}"] = str(switch in without).upper()
    sys.path.insert(0, str(tests.parent))
    functions = {name: getattr(flash_attn_3, name) for name in flash_attn_3.__all__}
    if "BACKWARD" not in without:
        functions["flash_attn_varlen_func"] = _without_idle_lengths
    module_of("flash_attn_interface", **functions)


def _without_idle_lengths(q: Tensor, k: Tensor, v: Tensor, *offsets: Any, **options: Any) -> Any:
    """``flash_attn_varlen_func`` of a call that wants gradients: the tests always give ``seqused_q`` and
    ``seqused_k``, with which the library has none. Those that say what the offsets say are left out."""
    for name, ends in zip(("seqused_q", "seqused_k"), offsets[:2], strict=True):
        used = options.get(name)
        if used is not None and bool((used == ends.diff()).all()):
            del options[name]
    return flash_attn_3.flash_attn_varlen_func(q, k, v, *offsets, **options)


def install_vllm(tests: Path) -> None:
    """``vllm.vllm_flash_attn``, and what vLLM's test asks of the platform."""
    module_of("vllm")
    module_of("vllm.platforms", current_platform=SimpleNamespace(seed_everything=torch.manual_seed))
    module_of(
        "vllm.vllm_flash_attn",
        flash_attn_varlen_func=vllm.flash_attn_varlen_func,
        is_fa_version_supported=lambda version: True,
        fa_version_unsupported_reason=lambda version: None,
    )
