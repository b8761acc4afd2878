"""Where a call runs. ``cuda`` and ``cpu`` have the same functions and never import each other."""

from flash_attention.devices import DEVICE_TYPES, backend

__all__ = ["DEVICE_TYPES", "backend"]
