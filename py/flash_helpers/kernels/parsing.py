"""Reads a configuration back from a kernel's name, as we, a demangler or the compiler print it."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from typing import Any

from flash_helpers.kernels.ampere.forward.config import FlashForwardKernelConfig
from flash_helpers.kernels.cpp_names import config_in_cpp_name
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.forward.parsing import names_hopper_kernel, parse_hopper_kernel_name
from flash_helpers.kernels.kernel import ForwardConfig
from flash_helpers.kernels.softmax import SOFTMAX_WORDS

_SHORT_FORM = re.compile(
    r"\s*\((?P<dtype>\w+), *(?P<d_head>\d+), *(?P<B_r>\d+), *(?P<B_c>\d+), *(?P<n_warps>\d+)\): *"
    r"(?P<words>[\w+]+)(?: \| [\w+]+)?\s*",
    re.ASCII,
)
_LOADS = re.compile(r"load_(\d+)_(\d+)_(\d+)_tiles", re.ASCII)
_FLAGS = {
    "async": "async_copy",
    "eager": "eager_load_blocks",
    "swizzled": "swizzled",
    "buffer": "mma_double_buffer_loads",
    "opt_softmax": "optimized_softmax",
}
_REFERENCES = {word: reference for reference, word in SOFTMAX_WORDS.items()}
_EXTRAS = {f.name: str(f.type) for f in fields(FlashForwardKernelConfig) if f.default is not MISSING}


def parse_kernel_name_into_config(name: str) -> ForwardConfig:
    """The configuration that a kernel's name states.

    Args:
        name: a ``short_form()`` with its tuple, of a configuration or of a kernel (`` | causal`` behind it),
            its words in any order; or a C++ name holding the configuration struct: demangled (as cuobjdump
            and profilers print it, or as ``to_cpp_struct()`` writes it) or mangled.

    Raises:
        ValueError: the name holds no configuration, or says more than one configuration means.
        TypeError: not a text.
    """
    if not isinstance(name, str):
        raise TypeError(f"a kernel's name is a str; given {name!r}, a {type(name).__name__}")
    if names_hopper_kernel(name):
        return parse_hopper_kernel_name(name)
    try:
        config = config_in_cpp_name(FlashForwardKernelConfig, name)
    except ValueError as error:
        raise _not_a_name(name) from error
    if config is not None:
        return config
    if match := _SHORT_FORM.fullmatch(name):
        return _from_short_form(match, name)
    raise _not_a_name(name)


def _from_short_form(match: re.Match[str], name: str) -> FlashForwardKernelConfig:
    words = match["words"].split("+")
    loads = [found for word in words if (found := _LOADS.fullmatch(word))]
    if len(loads) != 1:
        raise _not_a_name(name)
    values: dict[str, Any] = {field: int(match[field]) for field in ("d_head", "B_r", "B_c", "n_warps")}
    values |= dict.fromkeys(_FLAGS.values(), False)
    for word in words:
        field, _, number = word.rpartition("_")
        if word in _FLAGS:
            values[_FLAGS[word]] = True
        elif word in _REFERENCES:
            values["softmax_reference"] = _REFERENCES[word]
        elif _EXTRAS.get(word) == "bool":
            values[word] = True
        elif _EXTRAS.get(field) == "int" and number.isdecimal():
            values[field] = int(number)
    q, k, v = map(int, loads[0].groups())
    config = FlashForwardKernelConfig(
        dtype=DType.from_string(match["dtype"]),
        Q_mma_load_K_tiles=q,
        K_mma_load_K_tiles=k,
        V_mma_load_K_tiles=v,
        **values,
    )
    # A word that is unknown, is said twice or contradicts another is not among those of the result.
    if sorted(words) != sorted(config.short_form(include_tup=False).split("+")):
        raise _not_a_name(name)
    return config


def _not_a_name(name: str) -> ValueError:
    return ValueError(
        f"{name!r} names no kernel configuration; expected a short form such as "
        "'(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax' or a C++ name "
        "holding FlashForwardKernelConfig{...}"
    )
