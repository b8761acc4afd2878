"""The registry of kernels: every direction of every family, one line each.

A folder is loaded when something of it is first asked for: the direction of one of its configurations, or the
list of all directions.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from flash_helpers.kernels.kernel import ForwardConfig, ForwardKernel
from flash_helpers.lazy import LazySequence

if TYPE_CHECKING:
    from flash_helpers.kernels.direction import Direction
    from flash_helpers.kernels.family import Family

_FOLDERS = (  # each has a module ``direction``, which defines ``DIRECTION``
    "ampere.forward",
    "hopper.forward",
)


def _load(folder: str) -> Direction:
    direction: Direction = import_module(f"{__package__}.{folder}.direction").DIRECTION
    return direction


DIRECTIONS: LazySequence[Direction] = LazySequence(lambda: map(_load, _FOLDERS))
"""Every direction, in the order in which the binding lists them. The first one's parser reads what no other
one's names look like."""

FAMILIES: LazySequence[Family] = LazySequence(lambda: dict.fromkeys(d.family for d in DIRECTIONS))
"""Every family, in the order of ``DIRECTIONS``."""


def direction_of(kernel: ForwardKernel | ForwardConfig) -> Direction:
    """The direction that a kernel, or a configuration, is of.

    Raises:
        TypeError: the configuration is of no known class.
    """
    return _direction_of_class(type(kernel.config if isinstance(kernel, ForwardKernel) else kernel))


@cache
def _direction_of_class(kind: type) -> Direction:
    """By the folder of the class's module."""
    folder = kind.__module__.removeprefix(f"{__package__}.").rpartition(".")[0]
    if folder in _FOLDERS and (direction := _load(folder)).config is kind:
        return direction
    raise TypeError(f"configuration of type {kind.__name__}; known: {known_configs(', ')}")


def known_configs(separator: str) -> str:
    """The names of all configuration classes, for messages."""
    return separator.join(direction.config.__name__ for direction in DIRECTIONS)


def family_of(kernel: ForwardKernel | ForwardConfig) -> Family:
    """The family that a kernel, or a configuration, is of.

    Raises:
        TypeError: the configuration is of no known class.
    """
    return direction_of(kernel).family


def common_direction(kernels: Iterable[ForwardKernel]) -> Direction:
    """The one direction of all ``kernels``: a kernel library holds kernels of one direction of one family.

    Raises:
        ValueError: no kernel, or kernels of several directions.
        TypeError: a configuration is of no known class.
    """
    found = {direction_of(kernel) for kernel in kernels}
    if len(found) != 1:
        names = ", ".join(sorted(direction.label for direction in found)) or "none"
        raise ValueError(f"a kernel library holds kernels of exactly one family; given: {names}")
    return found.pop()
