"""Named sets of the Hopper family's backward kernels."""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.backward.choices import CHOICES
from flash_helpers.kernels.hopper.backward.config import HopperBackwardKernelConfig
from flash_helpers.kernels.kernel import BackwardKernel
from flash_helpers.kernels.traits import BackwardTraits


def get_hopper_backward_kernels() -> list[BackwardKernel]:
    """Every kernel that is chosen for a problem with or without a causal mask and no other feature."""
    return sorted(
        {
            BackwardKernel(replace(choice.config, dtype=dtype), BackwardTraits(causal=causal))
            for choice in CHOICES
            for dtype in DType
            for causal in ((False, True) if choice.masked is None else (choice.masked,))
        }
    )


def get_hopper_backward_configs() -> list[HopperBackwardKernelConfig]:
    """The configurations of these kernels."""
    return sorted({kernel.config for kernel in get_hopper_backward_kernels()})


def get_hopper_backward_tuning_configs() -> list[HopperBackwardKernelConfig]:
    """What ``tune`` measures: the choices, and each with one of the ideas that pay on some sizes alone."""
    changes: tuple[dict[str, bool], ...] = (
        {"ping_pong": True},
        {"ping_pong": False},
        {"lse_ahead": True},
        {"lse_ahead": False},
        {"float_p": True},
        {"float_p": False},
        {"reversed_heads": False},
    )
    varied = {
        replace(config, **change) for config in get_hopper_backward_configs() for change in ({}, *changes)
    }
    return sorted(config for config in varied if config.malformed_reason() is None)
