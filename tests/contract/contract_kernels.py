"""One good configuration for small problems, compiled for every set of features that contract tests use.

A choice prefers a kernel that is built to a slightly better one that is not, so that tests of automatic
choice compile little beside these.
"""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.kernel_configs import (
    DType,
    FlashForwardKernelConfig,
    ForwardKernel,
    ForwardTraits,
    choose_ampere_kernel,
    choose_hopper_kernel,
)
from flash_helpers.kernels.families import family_of
from flash_helpers.kernels.kernel import ForwardConfig

FEATURES: tuple[tuple[str, ...], ...] = (
    (),
    ("causal",),
    ("window",),
    ("softcap",),
    ("causal", "softcap"),
    ("sinks",),
    ("causal", "softcap", "sinks"),
)
PACKED: tuple[tuple[str, ...], ...] = ((), ("causal",), ("window",), ("softcap",), ("causal", "sinks"))


def plain_config(dtype: DType, d_head: int) -> FlashForwardKernelConfig:
    """The good configuration."""
    return FlashForwardKernelConfig(dtype, d_head, 64, 64, 4, True, True, True, 0, 2, 2, False, True)


def family_configs(dtype: DType, causal: bool) -> dict[str, ForwardConfig]:
    """What each family chooses for a few hundred queries of head size 64, able to give an LSE."""
    return {
        "ampere": choose_ampere_kernel(dtype, 64, causal, 512, lse=True)[0].config,
        "hopper": choose_hopper_kernel(dtype, 64, causal, 512)[0].config,
    }


def family_kernels(dtype: DType) -> list[ForwardKernel]:
    """``family_configs``, compiled for what tests of known faults use."""
    return [
        ForwardKernel(config, ForwardTraits(causal=causal, padded_head=padded))
        for causal in (False, True)
        for config in family_configs(dtype, causal).values()
        for padded in (False, True)
    ]


def kernels(target: int) -> list[ForwardKernel]:
    """All of them that run on a GPU of this generation."""
    traits = [ForwardTraits(**dict.fromkeys(names, True)) for names in FEATURES]
    packed = [ForwardTraits(varlen=True, **dict.fromkeys(names, True)) for names in PACKED]
    found = []
    for dtype in DType:
        for d_head in (64, 128):
            config = plain_config(dtype, d_head)
            found += [ForwardKernel(config, t) for t in traits]
            found += [ForwardKernel(config, replace(t, padded_head=True)) for t in traits]
            if dtype is DType.FP16:
                found += [ForwardKernel(config, t) for t in packed]
        found += family_kernels(dtype)
    return [kernel for kernel in found if family_of(kernel).runs_on(target)]
