"""Where a call runs: the device types, and the backend of each."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

DEVICE_TYPES = ("cuda", "cpu")


@cache
def backend(name: str) -> ModuleType:
    """The backend of a device type, imported when a tensor of that type first asks for it."""
    return import_module(f"flash_attention.backends.{name}")
