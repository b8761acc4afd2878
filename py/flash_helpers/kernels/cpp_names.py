"""Reads a configuration out of the C++ name of its kernel, as a demangler or the compiler prints it."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from typing import Any, TypeVar, cast, get_type_hints

Config = TypeVar("Config")

_MANGLED_VALUE = r"L(?:\d+[A-Za-z]+|[ib])(\d+)E"  # L5DType15E, Li128E, Lb1E


def config_in_cpp_name(config_type: type[Config], name: str) -> Config | None:
    """The configuration whose struct stands in a C++ name, demangled or mangled.

    Args:
        config_type: the dataclass; its struct has the same name.
        name: anything.

    Returns:
        None: the name holds no such struct with values.

    Raises:
        ValueError: the values are not those of this struct.
    """
    struct = config_type.__name__
    if match := re.search(rf"{struct}\s*\{{([^{{}}]+)\}}", name):
        texts = [text for text in match[1].split(",") if text.strip()]
        return _of_values(config_type, [_number(text, config_type) for text in texts])
    if match := re.search(rf"{len(struct)}{struct}((?:{_MANGLED_VALUE})+)E", name):
        return _of_values(config_type, [int(number) for number in re.findall(_MANGLED_VALUE, match[1])])
    return None


def _number(text: str, config_type: type[Any]) -> int:
    """One value of a printed struct: ``.B_r = 64``, ``(int)64``, ``DType::FP16``, ``true`` …"""
    text = re.sub(r"^\((?:\w|::)+\)", "", text.split("=")[-1].strip())
    if text in ("true", "false"):
        return int(text == "true")
    enum, _, enumerator = text.rpartition("::")
    kinds = {kind.__name__: kind for kind in get_type_hints(config_type).values()}
    members = getattr(kinds.get(enum), "__members__", {})
    return int(members[enumerator]) if enumerator in members else int(text)


def _of_values(config_type: type[Config], values: list[int]) -> Config:
    """Values by position. Compilers leave out trailing zeros when they print a struct.

    A name that ends before the fields with a default speaks of the fields without one: among the others is
    ``kv_stages`` of the Ampere family, which is never 0.
    """
    all_fields = fields(config_type)  # type: ignore[arg-type]
    if len(values) > len(all_fields):
        raise ValueError(f"{len(values)} values are given; {config_type.__name__} has {len(all_fields)}")
    required = sum(f.default is MISSING for f in all_fields)
    if len(values) <= required:
        values = values + [0] * (required - len(values))
        values += [int(cast(int, f.default)) for f in all_fields[required:]]
    values = values + [0] * (len(all_fields) - len(values))
    kinds = get_type_hints(config_type)
    return config_type(*(kinds[f.name](v) for f, v in zip(all_fields, values, strict=True)))
