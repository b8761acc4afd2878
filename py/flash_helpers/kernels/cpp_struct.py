"""Writes a dataclass as the C++ struct of the same name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def designated_initializer(value: Any) -> str:
    """The value as C++ source text; the compiler checks names and order.

    Args:
        value: a dataclass of numbers, bools, and enumerators with ``to_cpp_str()``.

    Returns:
        For example ``ForwardTraits{.causal = true, .window = false, …}``.
    """
    texts = ", ".join(f".{f.name} = {_text(getattr(value, f.name))}" for f in fields(value))
    return f"{type(value).__name__}{{{texts}}}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.to_cpp_str()) if hasattr(value, "to_cpp_str") else str(value)
