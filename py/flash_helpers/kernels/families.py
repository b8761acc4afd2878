"""The registry of kernels: every direction of every family, one line each.

A folder is loaded when something of it is first asked for: the direction of one of its configurations, or the
list of all directions.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flash_helpers.kernels.kernel import Kernel, KernelConfig
from flash_helpers.lazy import LazySequence

if TYPE_CHECKING:
    from flash_helpers.kernels.direction import Direction
    from flash_helpers.kernels.family import Family

_FOLDERS = (  # each has a module ``direction``, which defines ``DIRECTION``
    "ampere.forward",
    "hopper.forward",
    "ampere.backward",
    "hopper.backward",
)


def _load(folder: str) -> Direction:
    direction: Direction = import_module(f"{__package__}.{folder}.direction").DIRECTION
    return direction


DIRECTIONS: LazySequence[Direction] = LazySequence(lambda: map(_load, _FOLDERS))
"""Every direction, in the order in which the binding lists them. The first one's parser reads what no other
one's names look like."""

FAMILIES: LazySequence[Family] = LazySequence(lambda: dict.fromkeys(d.family for d in DIRECTIONS))
"""Every family, in the order of ``DIRECTIONS``."""


def direction_of(kernel: Kernel | KernelConfig) -> Direction:
    """The direction that a kernel, or a configuration, is of.

    Raises:
        TypeError: the configuration is of no known class.
    """
    kind: Any = type(kernel.config if isinstance(kernel, Kernel) else kernel)
    return _direction_of_class(kind)


@cache
def _direction_of_class(kind: type) -> Direction:
    """By the folder of the class's module."""
    folder = kind.__module__.removeprefix(f"{__package__}.").rpartition(".")[0]
    if folder in _FOLDERS and (direction := _load(folder)).config is kind:
        return direction
    raise TypeError(f"configuration of type {kind.__name__}; known: {known_configs(', ')}")


def kernel_of(config: KernelConfig, **features: bool) -> Kernel:
    """The kernel of a configuration with the features that are on, by the names of its direction's traits.

    Raises:
        TypeError: the configuration is of no known class, or its direction knows no such feature.
    """
    direction = direction_of(config)
    traits_type: Any = direction.kernel.traits_type
    return direction.make(config, traits_type(**features))


def known_configs(separator: str, direction: str | None = None) -> str:
    """The names of the configuration classes of a direction, for messages; None: of all."""
    return separator.join(d.config.__name__ for d in DIRECTIONS if direction in (None, d.name))


def family_of(kernel: Kernel | KernelConfig) -> Family:
    """The family that a kernel, or a configuration, is of.

    Raises:
        TypeError: the configuration is of no known class.
    """
    return direction_of(kernel).family


def directions(name: str) -> list[Direction]:
    """The directions of all families that have this name, ``forward`` say; no other one is loaded."""
    return [_load(folder) for folder in _FOLDERS if folder.rpartition(".")[2] == name]


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
