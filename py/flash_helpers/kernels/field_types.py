"""The types that a field of a configuration or of traits can have: those that have a counterpart in C++."""

from __future__ import annotations

from dataclasses import fields
from enum import IntEnum
from typing import Any, get_type_hints

NUMBERS = {bool: "bool", int: "int"}
"""Python's types of numbers to those of C++."""


def field_types(struct: type) -> dict[str, Any]:
    """Name and type of each field of a dataclass, in its order.

    Raises:
        TypeError: a field's type has no C++ counterpart.
    """
    types = get_type_hints(struct)
    for f in fields(struct):
        kind = types[f.name]
        if kind not in NUMBERS and not (isinstance(kind, type) and issubclass(kind, IntEnum)):
            raise TypeError(
                f"{struct.__name__}.{f.name} is declared as {f.type}; kernels take bool, int and "
                "enumerations: declare it as one of these, an IntEnum for a choice among several"
            )
    return {f.name: types[f.name] for f in fields(struct)}
