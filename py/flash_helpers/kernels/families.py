"""The registry of kernels: every direction of every family, one line each."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from flash_helpers.kernels.direction import Direction
from flash_helpers.kernels.family import Family
from flash_helpers.kernels.kernel import Kernel, KernelConfig

_FOLDERS = (  # each has a module ``direction``, which defines ``DIRECTION``
    "ampere.forward",
    "hopper.forward",
    "ampere.backward",
    "hopper.backward",
)

DIRECTIONS: tuple[Direction, ...] = tuple(
    importlib.import_module(f"flash_helpers.kernels.{folder}.direction").DIRECTION for folder in _FOLDERS
)
"""Every direction, in the order in which the binding lists them. The first one's parser reads what no other
one's names look like."""

FAMILIES: tuple[Family, ...] = tuple(dict.fromkeys(direction.family for direction in DIRECTIONS))
"""Every family, in the order of ``DIRECTIONS``."""

_BY_CONFIG = {direction.config: direction for direction in DIRECTIONS}


def direction_of(kernel: Kernel | KernelConfig) -> Direction:
    """The direction that a kernel, or a configuration, is of.

    Raises:
        TypeError: the configuration is of no known class.
    """
    config = kernel.config if isinstance(kernel, Kernel) else kernel
    if (direction := _BY_CONFIG.get(type(config))) is not None:
        return direction
    raise TypeError(f"configuration of type {type(config).__name__}; known: {known_configs(', ')}")


def kernel_of(config: KernelConfig, **features: bool) -> Kernel:
    """The kernel of a configuration with the features that are on, by the names of its direction's traits.

    Raises:
        TypeError: the configuration is of no known class, or its direction knows no such feature.
    """
    direction = direction_of(config)
    traits_type: Any = direction.kernel.traits_type
    return direction.make(config, traits_type(**features))


def is_config(value: object, direction: str | None = None) -> bool:
    """Whether a value is a configuration of a direction; None: of any."""
    found = _BY_CONFIG.get(type(value))
    return found is not None and direction in (None, found.name)


def known_configs(separator: str, direction: str | None = None) -> str:
    """The names of the configuration classes of a direction, for messages; None: of all."""
    return separator.join(config.__name__ for config, d in _BY_CONFIG.items() if direction in (None, d.name))


def family_of(kernel: Kernel | KernelConfig) -> Family:
    """The family that a kernel, or a configuration, is of.

    Raises:
        TypeError: the configuration is of no known class.
    """
    return direction_of(kernel).family


def directions(name: str) -> list[Direction]:
    """The directions of all families that have this name, ``forward`` say."""
    return [direction for direction in DIRECTIONS if direction.name == name]


def common_direction(kernels: Iterable[Kernel]) -> Direction:
    """The one direction of all ``kernels``: a kernel library holds kernels of one direction of one family.

    Raises:
        ValueError: no kernel, or kernels of several directions.
        TypeError: a configuration is of no known class.
    """
    found = {direction_of(kernel) for kernel in kernels}
    if len(found) != 1:
        names = ", ".join(sorted(direction.label for direction in found)) or "none"
        raise ValueError(
            f"a kernel library holds kernels of exactly one direction of one family; given: {names}"
        )
    return found.pop()
