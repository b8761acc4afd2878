"""Named sets of the Hopper family's backward kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.backward.choices import CHOICES, D64_BLOCK
from flash_helpers.kernels.hopper.backward.config import HopperBackwardKernelConfig
from flash_helpers.kernels.kernel import BackwardKernel
from flash_helpers.kernels.traits import BackwardTraits


def get_hopper_backward_kernels() -> list[BackwardKernel]:
    """Every configuration that is chosen for some problem, with and without a causal mask as chosen."""
    return sorted(
        {
            BackwardKernel(
                replace(choice.config, dtype=dtype),
                BackwardTraits(causal=causal, softcap=bool(choice.softcap)),
            )
            for choice in CHOICES
            for dtype in DType
            for causal in ((False, True) if choice.masked is None else (choice.masked,))
        }
    )


def get_hopper_backward_configs() -> list[HopperBackwardKernelConfig]:
    """The configurations of these kernels."""
    return sorted({replace(choice.config, dtype=dtype) for choice in CHOICES for dtype in DType})


def get_hopper_backward_tuning_configs() -> list[HopperBackwardKernelConfig]:
    """What ``tune`` measures: the choices and heads as items of head size 64, and each with one of the ideas
    that pay on some sizes alone.
    """
    changes: tuple[dict[str, Any], ...] = (
        {"ping_pong": True},
        {"ping_pong": False},
        {"lse_ahead": True},
        {"lse_ahead": False},
        {"float_p": True},
        {"float_p": False},
        {"reversed_heads": False},
    )
    configs = [*get_hopper_backward_configs(), *(replace(D64_BLOCK, dtype=dtype) for dtype in DType)]
    varied = {replace(config, **change) for config in configs for change in ({}, *changes)}
    return sorted(config for config in varied if config.malformed_reason() is None)
