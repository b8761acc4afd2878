"""Checks of a configuration that the caller names: its fields, and whether it runs on a device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from flash_attention.devices import backend
from flash_attention.errors import DeviceNotSupportedError, InfeasibleConfigError
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.families import known_configs
from flash_helpers.kernels.kernel import ForwardConfig, ForwardKernel, Kernel, KernelConfig
from flash_helpers.kernels.names import CONFIG_FIELDS, is_config
from flash_helpers.kernels.problem import FORWARD
from flash_helpers.messages import named_type

MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class ForwardPlan:
    """What a configuration demands of the tensors, worked out once.

    Attributes:
        kernel: the configuration with plain traits.
        dtype: element type of all tensors.
        seq_multiple: sequence lengths must be multiples of this.
        softmax_scale: d_head ** -0.5.
        devices: where the configuration is known to run.
    """

    kernel: ForwardKernel
    dtype: torch.dtype
    d_head: int
    B_r: int
    seq_multiple: int
    softmax_scale: float
    devices: set[torch.device] = field(default_factory=lambda: {torch.device("cpu")})


_plans: dict[ForwardConfig, ForwardPlan] = {}


def forward_plan(kernel_cfg: ForwardConfig) -> ForwardPlan:
    """The plan of a configuration, which is checked when it is first seen.

    Raises:
        TypeError: not a configuration, or a field has the wrong type.
        InfeasibleConfigError: no GPU can run it.
    """
    try:
        plan = _plans[kernel_cfg]
        if plan.kernel.config is kernel_cfg:
            return plan
    except (KeyError, TypeError):  # new, or not hashable and so no configuration
        pass
    check_config(kernel_cfg, "kernel_cfg")
    plan = ForwardPlan(
        kernel=ForwardKernel(kernel_cfg),
        dtype=kernel_cfg.dtype.to_torch_dtype(),
        d_head=kernel_cfg.d_head,
        B_r=kernel_cfg.B_r,
        seq_multiple=math.lcm(kernel_cfg.B_r, kernel_cfg.B_c),
        softmax_scale=kernel_cfg.d_head**-0.5,
    )
    _plans[kernel_cfg] = plan
    return plan


def check_config(config: KernelConfig, name: str, direction: str = FORWARD) -> None:
    """Types of all fields, then what holds on every device. Raises as ``forward_plan`` says.

    Args:
        config: the configuration.
        name: of the argument, for messages.
        direction: that it has to be of.
    """
    if isinstance(config, Kernel):
        raise TypeError(
            f"{name} is {named_type(config)}, a configuration with traits; the traits follow from the "
            "call: pass the configuration alone, kernel.config"
        )
    if not is_config(config, direction):
        raise TypeError(
            f"{name} is {named_type(config)}; it must be a {known_configs(' or a ', direction)}: "
            "build one, or read one from its name with "
            "flash_helpers.kernel_configs.parse_kernel_name_into_config(text)"
        )
    for field_name, wanted in CONFIG_FIELDS[type(config)].items():
        value = getattr(config, field_name)
        if type(value) is not wanted:
            raise TypeError(
                f"{name}.{field_name} is {value!r}, of type {type(value).__name__}; it must be of type "
                f"{wanted.__name__}" + (f", e.g. DType.from_string({value!r})" if wanted is DType else "")
            )
    if reason := config.malformed_reason():
        raise InfeasibleConfigError(f"{name} {config.short_form()} cannot run on any GPU: {reason}")


def check_fits_device(config: KernelConfig, device: torch.device) -> None:
    """Capability and resources of a CUDA device, from its facts."""
    if device.type != "cuda":
        return
    check_fits_facts(config, backend("cuda").device_facts_of(device), str(device))


def check_fits_facts(
    config: KernelConfig, facts: DeviceFacts, where: str, name: str = "kernel_cfg", traits: Any = None
) -> None:
    """The same of a GPU that need not be there.

    Args:
        where: its name, for messages.
        name: of the argument, for messages.
        traits: that the configuration is compiled for, which may take memory, too; None: none.
    """
    capability = ".".join(map(str, facts.capability))
    if facts.capability < MIN_CAPABILITY:
        raise DeviceNotSupportedError(
            f"{where} is a {facts.name} of compute capability {capability}; the kernels need "
            f"{'.'.join(map(str, MIN_CAPABILITY))} or newer: use such a GPU, or CPU tensors"
        )
    reason = config.infeasible_reason(facts, *(() if traits is None else (traits,)))
    if reason:
        raise InfeasibleConfigError(
            f"{name} {config.short_form()} cannot run on {where} ({facts.name}, compute capability "
            f"{capability}): {reason}; take a smaller tile or another family, or let attention() choose"
        )
