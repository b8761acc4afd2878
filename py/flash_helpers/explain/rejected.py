"""The nearest configurations that are not used, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.kernel import KernelConfig


@dataclass(frozen=True)
class Rejected:
    """A configuration that is not used.

    Attributes:
        config: the configuration.
        change: how it differs, e.g. ``B_r 64 -> 128``.
        reason: why the device can't run it, or why the tuner leaves it out.
    """

    config: KernelConfig
    change: str
    reason: str


def nearest_rejected(config: KernelConfig, facts: DeviceFacts) -> list[Rejected]:
    """All configurations that differ from ``config`` in one choice and are rejected, in field order.

    Left out are those that are rejected for the same reason as ``config`` itself, whatever the choice.
    """
    own = config.infeasible_reason(facts)
    found = []
    for change, neighbour in _neighbours(config):
        reason = neighbour.infeasible_reason(facts) or direction_of(config).untuned_reason(neighbour)
        if reason not in (None, own):
            found.append(Rejected(neighbour, change, reason))
    return found


def _neighbours(config: KernelConfig) -> Iterator[tuple[str, KernelConfig]]:
    for name, values in direction_of(config).neighbours.items():
        present = getattr(config, name)
        place = values.index(present) if present in values else None
        for number, value in enumerate(values):
            near = place is None or abs(number - place) == 1
            if near and value != present:
                change: dict[str, Any] = {name: value}
                yield f"{name} {_word(present)} -> {_word(value)}", replace(config, **change)  # type: ignore[type-var]


def _word(value: int | bool) -> str:
    return value.name if isinstance(value, IntEnum) else str(value)
