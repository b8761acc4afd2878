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


def backward_backend(device_type: str) -> str:
    """The name of the backend that computes gradients on a device type, for ``backend``."""
    return {"cuda": "cuda_backward", "cpu": "cpu_gradients"}[device_type]
