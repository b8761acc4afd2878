"""Named sets of the family's backward configurations: what is built ahead of time, the tuning space."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flash_helpers.kernels.ampere.backward.choices import CHOICES
from flash_helpers.kernels.ampere.backward.config import (
    MAX_REGISTERS,
    DQSum,
    DQWarps,
    FlashBackwardKernelConfig,
)
from flash_helpers.kernels.dtype import DType

REGISTER_OVERHEAD = 44
"""Registers beside the sums: fragments under way, addresses, row numbers of a step; found by compiling."""

BLOCKS = {  # d_head: (B_r, B_c, n_warps, paired_warps)
    64: ((64, 128, 8, False), (128, 128, 8, False), (64, 64, 4, False)),
    128: ((64, 128, 8, False), (64, 64, 8, True), (64, 64, 8, False)),
    256: ((64, 64, 8, True), (64, 64, 8, False)),
}
HELD = {64: ((False, False), (True, True)), 128: ((False, False),), 256: ((False, False),)}


def get_backward_kernels_to_build(
    dtypes: Iterable[DType] = (DType.FP16, DType.BF16),
) -> list[FlashBackwardKernelConfig]:
    """What is built ahead of time: the choices for every GPU, sorted, each once."""
    return sorted(
        {
            choice.form(dtype, deterministic)
            for choice in CHOICES
            for dtype in dtypes
            for deterministic in (False, True)
        }
    )


def get_backward_tuning_configs(
    dtypes: Iterable[DType] = (DType.FP16, DType.BF16),
) -> list[FlashBackwardKernelConfig]:
    """The tuning space: blocks x stages x who makes dQ x what stays in registers, and the choices.

    Args:
        dtypes: element types.
    """
    found = set(get_backward_kernels_to_build(dtypes))
    for dtype in dtypes:
        for d_head, blocks in BLOCKS.items():
            for B_r, B_c, n_warps, paired in blocks:
                for stages in (1, 2, 3):
                    for dq_warps in DQWarps:
                        for holds_K, holds_V in HELD[d_head]:
                            found.add(
                                FlashBackwardKernelConfig(
                                    dtype, d_head, d_head, B_r, B_c, n_warps, True, stages, 2, paired,
                                    holds_K, holds_V, dq_warps,
                                )
                            )  # fmt: skip
    for config in list(found):
        if config.dq_sum == DQSum.ATOMIC:
            found.add(replace(config, dq_sum=DQSum.ORDERED))
    return sorted(config for config in found if untuned_reason(config) is None)


def untuned_reason(config: FlashBackwardKernelConfig) -> str | None:
    """Why the tuner leaves a configuration out, or None."""
    if reason := config.malformed_reason():
        return reason
    held = max(config.resident_registers(), config.dq_resident_registers())
    if held + REGISTER_OVERHEAD > MAX_REGISTERS:
        return f"sums and scores take {held} of {MAX_REGISTERS} registers: it would spill"
    return None
