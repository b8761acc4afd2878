"""Where a call runs: the device types, the backend of each, and what chooses for it."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

DEVICE_TYPES = ("cuda", "cpu")


@cache
def backend(name: str) -> ModuleType:
    """The backend of a device type, imported when a tensor of that type first asks for it."""
    return import_module(f"flash_attention.backends.{name}")


@cache
def chooser(device_type: str) -> ModuleType:
    """The module whose ``choice_on`` chooses for a device type, imported when a call first needs a choice."""
    return import_module(f"flash_attention.run.{device_type}_choice")


def backward_backend(device_type: str) -> str:
    """The name of the backend that computes gradients on a device type, for ``backend``."""
    return {"cuda": "cuda_backward", "cpu": "cpu_gradients"}[device_type]
