"""Reads a Hopper configuration back from a kernel's name, as we, a demangler or the compiler print it."""

from __future__ import annotations

import re
from typing import Any

from flash_helpers.kernels.cpp_names import config_in_cpp_name
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.forward.config import (
    FLAG_WORDS,
    NEXT_ITEM_WORDS,
    NUMBER_WORDS,
    WARPGROUP_ROWS,
    HopperForwardKernelConfig,
    NextItem,
)
from flash_helpers.kernels.softmax import SOFTMAX_WORDS

_SHORT_FORM = re.compile(
    r"\s*\((?P<dtype>\w+), *(?P<d>\d+)(?:/(?P<d_v>\d+))?, *(?P<B_r>\d+), *(?P<B_c>\d+), *(?P<n>\d)wg\): *"
    r"tma\+kv_(?P<kv>[1-9]\d*)\+q_(?P<q>[1-9]\d*)(?P<words>(?:\+\w+)*)(?: \| [\w+]+)?\s*",
    re.ASCII,
)


def names_hopper_kernel(name: str) -> bool:
    """Whether a kernel's name speaks of this family, be it well-formed or not."""
    return "HopperForwardKernelConfig" in name or "wg):" in name


def parse_hopper_kernel_name(name: str) -> HopperForwardKernelConfig:
    """The configuration that a kernel's name states.

    Args:
        name: a ``short_form()`` with its tuple and head size, or a C++ name holding the configuration
            struct: demangled (as cuobjdump and profilers print it, or as ``to_cpp_struct()`` writes it)
            or mangled.

    Raises:
        ValueError: the name holds no configuration of this family.
    """
    try:
        config = config_in_cpp_name(HopperForwardKernelConfig, name)
    except ValueError as error:
        raise _not_a_name(name) from error
    if config is not None:
        return config
    if match := _SHORT_FORM.fullmatch(name):
        return _from_short_form(match, name)
    raise _not_a_name(name)


def _from_short_form(match: re.Match[str], name: str) -> HopperForwardKernelConfig:
    words = [word for word in match["words"].split("+") if word]
    numbers: dict[str, Any] = {}
    for field, prefix in NUMBER_WORDS.items():
        numbered = [word for word in words if re.fullmatch(rf"{prefix}_[1-9]\d*", word)]
        if len(numbered) > 1:
            raise _not_a_name(name)
        words = [word for word in words if word not in numbered]
        numbers[field] = int(numbered[0].removeprefix(f"{prefix}_")) if numbered else 0
    softmax = [key for key, word in SOFTMAX_WORDS.items() if word in words]
    next_item = [key for key, word in NEXT_ITEM_WORDS.items() if word in words] or [NextItem.NONE]
    flags = {field: word in words for field, word in FLAG_WORDS.items()}
    known = {*SOFTMAX_WORDS.values(), *NEXT_ITEM_WORDS.values(), *FLAG_WORDS.values()}
    B_r = int(match["B_r"])
    unique = len(words) == len(set(words)) and len(softmax) == len(next_item) == 1
    if not unique or not known.issuperset(words) or B_r // WARPGROUP_ROWS != int(match["n"]):
        raise _not_a_name(name)
    return HopperForwardKernelConfig(
        dtype=DType.from_string(match["dtype"]),
        d_head=int(match["d"]),
        d_head_v=int(match["d_v"] or match["d"]),
        B_r=B_r,
        B_c=int(match["B_c"]),
        kv_stages=int(match["kv"]),
        q_stages=int(match["q"]),
        softmax_reference=softmax[0],
        next_item=next_item[0],
        **flags,
        **numbers,
    )


def _not_a_name(name: str) -> ValueError:
    return ValueError(
        f"{name!r} names no Hopper kernel configuration; expected a short form such as "
        "'(BF16, 128, 128, 128, 2wg): tma+kv_2+q_2+overlap+ping_pong+lagged+sections' or a C++ name holding "
        "HopperForwardKernelConfig{...}"
    )
