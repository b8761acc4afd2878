"""The libraries whose own tests the runner runs: their names here, what is refused, what is left out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import flash_attn_module
import torch
from parameter_grid import Case

from flash_attention.integrations import flash_attn_3, vllm

Rules = Mapping[str, tuple[str, Callable[[Any], bool]]]


def _everything(case: Case) -> bool:
    return True


def _as_it_is(module: ModuleType) -> None:
    """The test file needs nothing."""


@dataclass(frozen=True)
class Library:
    """One library.

    Attributes:
        install: makes its names those of this library; the argument is the path of the test file.
        outside: by parameter of the tests, the argument that is refused, and for which values.
        outside_in: the same, of single functions.
        backward_only: functions that assert nothing but gradients.
        left_out: others that are not run.
        wanted: cases for which it is false are left out: what no argument names.
        prepare: what is done to the loaded file.
    """

    install: Callable[[Path], None]
    outside: Rules
    outside_in: Mapping[str, Rules] = field(default_factory=dict)
    backward_only: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    wanted: Callable[[Case], bool] = _everything
    prepare: Callable[[ModuleType], None] = _as_it_is


# ---------------------------------------------------------------------- flash-attn 2
FLASH_ATTN = Library(
    install=lambda path: flash_attn_module.install(),
    outside={"dropout_p": ("dropout_p", lambda p: p > 0), "alibi": ("alibi_slopes", bool)},
    backward_only=(
        "test_flash_attn_bwd_overflow",
        "test_flash_attn_bwd_transpose",
        "test_flash_attn_bwd_varlen_overflow",
        "test_flash_attn_deterministic",
        "test_flash_attn_varlen_deterministic",
    ),
)


# ---------------------------------------------------------------------- flash-attn 3
def _install_flash_attn_3(path: Path) -> None:
    """Its test file reads switches from the environment, and helpers from its own folder."""
    flash_attn_module.install()
    for switch in ("FP8", "BACKWARD"):
        os.environ[f"FLASH_ATTENTION_DISABLE_{switch}"] = "TRUE"
    sys.path.insert(0, str(path.parent))
    functions = {name: getattr(flash_attn_3, name) for name in flash_attn_3.__all__}
    flash_attn_module.module("flash_attn_interface", **functions)


def _without_chunks(module: ModuleType) -> None:
    """``attention_chunk`` is a function of the user's here, which no GPU kernel takes yet."""
    module.__dict__["DISABLE_LOCAL"] = True


FLASH_ATTN_3 = Library(
    install=_install_flash_attn_3,
    outside={"has_qv": ("qv", bool)},
    left_out=(  # about gradients, clusters, and operators of one name
        "test_flash_attn_race_condition",
        "test_flash_attn_cluster",
        "test_flash3_bw_compatibility",
    ),
    # At head size 64 it takes 512 columns of V.
    wanted=lambda case: case.get("d", 128) > 64 or "seqlen_q" not in case,
    prepare=_without_chunks,
)


# ---------------------------------------------------------------------- vLLM
def _install_vllm(path: Path) -> None:
    platform = SimpleNamespace(seed_everything=torch.manual_seed)
    flash_attn_module.module("vllm")
    flash_attn_module.module("vllm.platforms", current_platform=platform)
    flash_attn_module.module(
        "vllm.vllm_flash_attn",
        flash_attn_varlen_func=vllm.flash_attn_varlen_func,
        is_fa_version_supported=lambda version: True,
        fa_version_unsupported_reason=lambda version: None,
    )


VLLM = Library(
    install=_install_vllm,
    outside={"q_dtype": ("q_descale", lambda dtype: dtype is not None)},
)

LIBRARIES = {"flash_attn": FLASH_ATTN, "flash_attn_3": FLASH_ATTN_3, "vllm": VLLM}
