"""Reads a configuration back from a kernel's name, as we, a demangler or the compiler print it."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields
from typing import Any, cast

from flash_helpers.configs.ampere import FlashForwardKernelConfig
from flash_helpers.configs.dtype import DType
from flash_helpers.configs.hopper_parsing import names_hopper_kernel, parse_hopper_kernel_name
from flash_helpers.configs.kernel import ForwardConfig
from flash_helpers.configs.softmax import SOFTMAX_WORDS, SoftmaxReference

_SHORT_FORM = re.compile(r"\((?P<tuple>[^)]*)\):\s*(?P<flags>[\w+]+)")
_DEMANGLED = re.compile(r"FlashForwardKernelConfig\s*\{(?P<values>[^{}]*)\}")
_MANGLED = re.compile(r"24FlashForwardKernelConfig(?P<values>(?:L\w+?E)*)E")
_MANGLED_VALUE = re.compile(r"L(?:5DType|16SoftmaxReference|i|b)(?P<number>\d+)E")
_FLAGS = {
    "async": "async_copy",
    "eager": "eager_load_blocks",
    "swizzled": "swizzled",
    "buffer": "mma_double_buffer_loads",
    "opt_softmax": "optimized_softmax",
}
_TYPES: dict[str, Any] = {"DType": DType, "SoftmaxReference": SoftmaxReference, "bool": bool, "int": int}
_REFERENCES = {word: reference for reference, word in SOFTMAX_WORDS.items()}
_LOAD = re.compile(r"load_(\d+)_(\d+)_(\d+)_tiles")


def parse_kernel_name_into_config(name: str) -> ForwardConfig:
    """The configuration that a kernel's name states.

    Args:
        name: a ``short_form()`` with its tuple, or a C++ name holding the configuration struct: demangled
            (as cuobjdump and profilers print it, or as ``to_cpp_struct()`` writes it) or mangled.

    Raises:
        ValueError: the name holds no configuration.
        TypeError: not a text.
    """
    if not isinstance(name, str):
        raise TypeError(f"a kernel's name is a str; given {name!r}, a {type(name).__name__}")
    if names_hopper_kernel(name):
        return parse_hopper_kernel_name(name)
    if match := _DEMANGLED.search(name):
        return _from_values([_number(text) for text in match["values"].split(",") if text.strip()], name)
    if match := _MANGLED.search(name):
        return _from_values([int(v["number"]) for v in _MANGLED_VALUE.finditer(match["values"])], name)
    if match := _SHORT_FORM.search(name):
        return _from_short_form(match["tuple"], match["flags"], name)
    raise _not_a_name(name)


def _number(text: str) -> int:
    """One value of a printed struct: ``.B_r = 64``, ``(int)64``, ``DType::FP16``, ``true`` …"""
    text = text.split("=")[-1].strip()
    text = re.sub(r"^\((?:\w|::)+\)", "", text)
    if text in ("true", "false"):
        return int(text == "true")
    enum, _, enumerator = text.rpartition("::")
    return int(_TYPES[enum][enumerator]) if enum in _TYPES else int(text)


def _typed(f: Field[Any], value: int) -> Any:
    return _TYPES[str(f.type)](value)


def _from_values(values: list[int], name: str) -> FlashForwardKernelConfig:
    """Values by position. Compilers leave out trailing zeros when they print a struct.

    A name that ends before the fields with a default speaks of the fields without one: among the others is
    ``kv_stages``, which is never 0.
    """
    all_fields = fields(FlashForwardKernelConfig)
    if not 1 <= len(values) <= len(all_fields):
        raise _not_a_name(name)
    required = sum(f.default is MISSING for f in all_fields)
    if len(values) <= required:
        values = values + [0] * (required - len(values))
        values += [int(cast(int, f.default)) for f in all_fields[required:]]
    values = values + [0] * (len(all_fields) - len(values))
    return FlashForwardKernelConfig(*(_typed(f, v) for f, v in zip(all_fields, values, strict=True)))


def _from_short_form(tuple_text: str, flags_text: str, name: str) -> FlashForwardKernelConfig:
    parts = [part.strip() for part in tuple_text.split(",")]
    tokens = flags_text.split("+")
    loads = [match for token in tokens if (match := _LOAD.fullmatch(token))]
    if len(parts) != 5 or len(loads) != 1:
        raise _not_a_name(name)
    values: dict[str, Any] = dict.fromkeys(_FLAGS.values(), False)
    extras = {f.name: f for f in fields(FlashForwardKernelConfig) if f.default is not MISSING}
    for token in tokens:
        extra, _, value = token.rpartition("_")
        if token in _FLAGS:
            values[_FLAGS[token]] = True
        elif token in _REFERENCES:
            values["softmax_reference"] = _REFERENCES[token]
        elif token in extras:
            values[token] = True
        elif extra in extras and value.isdigit():
            values[extra] = _typed(extras[extra], int(value))
        elif not _LOAD.fullmatch(token):
            raise _not_a_name(name)
    q, k, v = (int(number) for number in loads[0].groups())
    try:
        d_head, B_r, B_c, n_warps = map(int, parts[1:])
    except ValueError:
        raise _not_a_name(name) from None
    return FlashForwardKernelConfig(
        dtype=DType.from_string(parts[0]),
        d_head=d_head,
        B_r=B_r,
        B_c=B_c,
        n_warps=n_warps,
        Q_mma_load_K_tiles=q,
        K_mma_load_K_tiles=k,
        V_mma_load_K_tiles=v,
        **values,
    )


def _not_a_name(name: str) -> ValueError:
    return ValueError(
        f"{name!r} names no kernel configuration; expected a short form such as "
        "'(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax' or a C++ name "
        "holding FlashForwardKernelConfig{...}"
    )
