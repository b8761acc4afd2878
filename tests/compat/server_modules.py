"""Modules named as flash-attn 3's and vLLM's whose functions are this library's, for their own tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from flash_attn_module import install, module_of

from flash_attention.integrations import flash_attn_3, vllm


def install_cache_3(tests: Path) -> None:
    """``flash_attn_interface`` of flash-attn 3, with its calls on caches, and the helpers of its tests."""
    install()
    for switch in ("FP8", "BACKWARD"):  # read while the test file is loaded
        os.environ[f"FLASH_ATTENTION_DISABLE_{switch}"] = "TRUE"
    sys.path.insert(0, str(tests.parent))
    module_of("flash_attn_interface", **{name: getattr(flash_attn_3, name) for name in flash_attn_3.__all__})


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
