"""Where a call runs. ``cuda`` and ``cpu`` have the same functions and never import each other."""

from __future__ import annotations

from functools import cache
from types import ModuleType

DEVICE_TYPES = ("cuda", "cpu")


@cache
def backend(name: str) -> ModuleType:
    """The backend for a device type. Imports ``cuda`` only when a CUDA tensor asks for it."""
    if name == "cuda":
        from flash_attention.backends import cuda

        return cuda
    from flash_attention.backends import cpu

    return cpu
