"""The public names of the configurations: a facade over ``flash_helpers.configs``."""

from flash_helpers.configs.ampere import FlashForwardKernelConfig
from flash_helpers.configs.ampere_sets import (
    choose_ampere_kernel,
    get_ampere_best_kernels,
)
from flash_helpers.configs.device_facts import KNOWN_DEVICES, DeviceFacts, device_facts
from flash_helpers.configs.dtype import DType
from flash_helpers.configs.hopper import HopperForwardKernelConfig, NextItem
from flash_helpers.configs.hopper_ladder import get_hopper_progression_configs
from flash_helpers.configs.hopper_sets import (
    choose_hopper_kernel,
    get_hopper_best_kernels,
    get_hopper_kernels_to_build,
)
from flash_helpers.configs.kernel import ForwardConfig, ForwardKernel
from flash_helpers.configs.ladders import get_ladder
from flash_helpers.configs.parsing import parse_kernel_name_into_config
from flash_helpers.configs.sets import (
    get_autotuning_kernel_configs,
    get_kernel_configs,
    get_kernel_progression_configs,
    get_kernels_to_build,
    should_autotune_config,
)
from flash_helpers.configs.softmax import SoftmaxReference
from flash_helpers.configs.traits import PLAIN, ForwardTraits

__all__ = [
    "KNOWN_DEVICES",
    "PLAIN",
    "DType",
    "DeviceFacts",
    "FlashForwardKernelConfig",
    "ForwardConfig",
    "ForwardKernel",
    "ForwardTraits",
    "HopperForwardKernelConfig",
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
