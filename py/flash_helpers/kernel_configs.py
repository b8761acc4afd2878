"""The public names of the configurations: a facade over ``flash_helpers.configs``."""

from flash_helpers.configs.ampere import FlashForwardKernelConfig
from flash_helpers.configs.device_facts import KNOWN_DEVICES, DeviceFacts, device_facts
from flash_helpers.configs.dtype import DType
from flash_helpers.configs.kernel import ForwardKernel
from flash_helpers.configs.traits import PLAIN, ForwardTraits

__all__ = [
    "KNOWN_DEVICES",
    "PLAIN",
    "DType",
    "DeviceFacts",
    "FlashForwardKernelConfig",
    "ForwardKernel",
    "ForwardTraits",
    "device_facts",
]
