"""The nearest configurations that are not used, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from flash_helpers.kernels.ampere.forward.config import FlashForwardKernelConfig
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.hopper.forward.config import (
    PRODUCT_WIDTHS,
    REGISTERS,
    WARPGROUP_ROWS,
    HopperForwardKernelConfig,
    NextItem,
    SoftmaxReference,
)
from flash_helpers.kernels.kernel import ForwardConfig
from flash_helpers.kernels.sets import skip_autotune_reason

CHOICES: dict[str, tuple[int | bool, ...]] = {
    "B_r": (32, 64, 128, 256),
    "B_c": (16, 32, 64, 128, 256),
    "n_warps": (2, 4, 8, 16),
    "async_copy": (False, True),
    "eager_load_blocks": (False, True),
    "Q_mma_load_K_tiles": (0, 2),
    "K_mma_load_K_tiles": (0, 2),
    "V_mma_load_K_tiles": (0, 2),
    "mma_double_buffer_loads": (False, True),
    "kv_stages": tuple(range(1, 9)),
    "mbarrier": (False, True),
    "softmax_reference": tuple(SoftmaxReference),
    "fragments_ahead": (0, 1, 2),
    "paired_warps": (False, True),
}
"""What a neighbour may differ in. Values next to the present one in this order count as near."""

HOPPER_CHOICES: dict[str, tuple[int | bool, ...]] = {
    "B_r": tuple(WARPGROUP_ROWS * n for n in REGISTERS),
    "B_c": PRODUCT_WIDTHS,
    "kv_stages": tuple(range(1, 9)),
    "extra_k_stages": (0, 1, 2),
    "q_stages": tuple(range(1, 5)),
    "overlap_products": (False, True),
    "ping_pong": (False, True),
    "softmax_reference": tuple(SoftmaxReference),
    "forced_overlap": (False, True),
    "next_item": tuple(NextItem),
    "direct_store": (False, True),
}
"""The same for the Hopper family; what never makes a kernel impossible is left out."""


@dataclass(frozen=True)
class Rejected:
    """A configuration that is not used.

    Attributes:
        config: the configuration.
        change: how it differs, e.g. ``B_r 64 -> 128``.
        reason: why the device can't run it, or why the tuner leaves it out.
    """

    config: ForwardConfig
    change: str
    reason: str


def nearest_rejected(config: ForwardConfig, facts: DeviceFacts) -> list[Rejected]:
    """All configurations that differ from ``config`` in one choice and are rejected, in field order."""
    found = []
    for change, neighbour in _neighbours(config):
        reason = neighbour.infeasible_reason(facts)
        if reason is None and isinstance(neighbour, FlashForwardKernelConfig):
            reason = skip_autotune_reason(neighbour)
        if reason is not None:
            found.append(Rejected(neighbour, change, reason))
    return found


def _neighbours(config: ForwardConfig) -> Iterator[tuple[str, ForwardConfig]]:
    choices = HOPPER_CHOICES if isinstance(config, HopperForwardKernelConfig) else CHOICES
    for name, values in choices.items():
        present = getattr(config, name)
        place = values.index(present) if present in values else None
        for number, value in enumerate(values):
            near = place is None or abs(number - place) == 1
            if near and value != present:
                change: dict[str, Any] = {name: value}
                yield f"{name} {_word(present)} -> {_word(value)}", replace(config, **change)


def _word(value: int | bool) -> str:
    return value.name if isinstance(value, IntEnum) else str(value)
