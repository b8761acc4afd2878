"""The public names of the configurations: a facade over ``flash_helpers.kernels``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flash_helpers.lazy import lazy_names

if TYPE_CHECKING:
    from flash_helpers.kernels.ampere.backward.config import FlashBackwardKernelConfig
    from flash_helpers.kernels.ampere.forward.choices import (
        choose_ampere_kernel,
        get_ampere_best_kernels,
    )
    from flash_helpers.kernels.ampere.forward.config import FlashForwardKernelConfig
    from flash_helpers.kernels.ampere.forward.sets import (
        get_autotuning_kernel_configs,
        get_kernel_configs,
        get_kernel_progression_configs,
        get_kernels_to_build,
        should_autotune_config,
    )
    from flash_helpers.kernels.device_facts import KNOWN_DEVICES, DeviceFacts, device_facts
    from flash_helpers.kernels.dtype import DType
    from flash_helpers.kernels.hopper.backward.config import HopperBackwardKernelConfig
    from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
    from flash_helpers.kernels.hopper.forward.ladder import get_hopper_progression_configs
    from flash_helpers.kernels.hopper.forward.next_item import NextItem
    from flash_helpers.kernels.hopper.forward.sets import (
        choose_hopper_kernel,
        get_hopper_best_kernels,
        get_hopper_kernels_to_build,
    )
    from flash_helpers.kernels.kernel import (
        BackwardConfig,
        BackwardKernel,
        ForwardConfig,
        ForwardKernel,
        Kernel,
        KernelConfig,
    )
    from flash_helpers.kernels.ladders import get_ladder
    from flash_helpers.kernels.parsing import parse_kernel_name_into_config
    from flash_helpers.kernels.softmax import SoftmaxReference
    from flash_helpers.kernels.traits import PLAIN, PLAIN_BACKWARD, BackwardTraits, ForwardTraits

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "flash_helpers.kernels.ampere.backward.config": ("FlashBackwardKernelConfig",),
        "flash_helpers.kernels.ampere.forward.choices": (
            "choose_ampere_kernel",
            "get_ampere_best_kernels",
        ),
        "flash_helpers.kernels.ampere.forward.config": ("FlashForwardKernelConfig",),
        "flash_helpers.kernels.ampere.forward.sets": (
            "get_autotuning_kernel_configs",
            "get_kernel_configs",
            "get_kernel_progression_configs",
            "get_kernels_to_build",
            "should_autotune_config",
        ),
        "flash_helpers.kernels.device_facts": (
            "KNOWN_DEVICES",
            "DeviceFacts",
            "device_facts",
        ),
        "flash_helpers.kernels.dtype": ("DType",),
        "flash_helpers.kernels.hopper.backward.config": ("HopperBackwardKernelConfig",),
        "flash_helpers.kernels.hopper.forward.config": ("HopperForwardKernelConfig",),
        "flash_helpers.kernels.hopper.forward.ladder": ("get_hopper_progression_configs",),
        "flash_helpers.kernels.hopper.forward.next_item": ("NextItem",),
        "flash_helpers.kernels.hopper.forward.sets": (
            "choose_hopper_kernel",
            "get_hopper_best_kernels",
            "get_hopper_kernels_to_build",
        ),
        "flash_helpers.kernels.kernel": (
            "BackwardConfig",
            "BackwardKernel",
            "ForwardConfig",
            "ForwardKernel",
            "Kernel",
            "KernelConfig",
        ),
        "flash_helpers.kernels.ladders": ("get_ladder",),
        "flash_helpers.kernels.parsing": ("parse_kernel_name_into_config",),
        "flash_helpers.kernels.softmax": ("SoftmaxReference",),
        "flash_helpers.kernels.traits": (
            "PLAIN",
            "PLAIN_BACKWARD",
            "BackwardTraits",
            "ForwardTraits",
        ),
    },
)

__all__ = [
    "KNOWN_DEVICES",
    "PLAIN",
    "PLAIN_BACKWARD",
    "BackwardConfig",
    "BackwardKernel",
    "BackwardTraits",
    "DType",
    "DeviceFacts",
    "FlashBackwardKernelConfig",
    "FlashForwardKernelConfig",
    "ForwardConfig",
    "ForwardKernel",
    "ForwardTraits",
    "HopperBackwardKernelConfig",
    "HopperForwardKernelConfig",
    "Kernel",
    "KernelConfig",
    "NextItem",
    "SoftmaxReference",
    "choose_ampere_kernel",
    "choose_hopper_kernel",
    "device_facts",
    "get_ampere_best_kernels",
    "get_autotuning_kernel_configs",
    "get_hopper_best_kernels",
    "get_hopper_kernels_to_build",
    "get_hopper_progression_configs",
    "get_kernel_configs",
    "get_kernel_progression_configs",
    "get_kernels_to_build",
    "get_ladder",
    "parse_kernel_name_into_config",
    "should_autotune_config",
]
