"""Arguments of the operators, in the order in which layouts and options declare them.

An operator takes q, k, v, the fields of a layout, then the options that travel, tensors first. A window
travels as two numbers, a configuration as its name. The operators are of one library of ``torch.library``.
"""

from __future__ import annotations

import functools
from typing import Any, get_type_hints

import torch
from torch import Tensor

from flash_attention.call import Layout
from flash_attention.options import Options
from flash_helpers.kernels.kernel import BackwardConfig, ForwardConfig, KernelConfig
from flash_helpers.kernels.parsing import parse_kernel_name_into_config
from flash_helpers.kernels.problem import Window

# out is an argument of operators of its own, the backend has been checked, functions cannot travel, and
# operators draw no numbers.
STAY = ("out", "backend", "score_mod", "mask_mod", "dropout_p", "dropout_seed")
TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "SymInt",
    int | None: "SymInt?",
    torch.dtype | None: "ScalarType?",
    float: "float",
    float | None: "float?",
    str | None: "str?",
    ForwardConfig | None: "str?",
    BackwardConfig | None: "str?",
}

LIBRARY = torch.library.Library("flash_attention", "DEF")
# Inductor hands the inputs over with the strides they have in eager mode.
TAGS = (torch.Tag.needs_fixed_stride_order,)

_HINTS = get_type_hints(Options)
# Tensors first, else as Options has them.
TRAVEL = sorted((name for name in _HINTS if name not in STAY), key=lambda name: _HINTS[name] != Tensor | None)
CONFIGS = ("config", "backward_config")
_SIDES = ("window_left", "window_right")
NAMES = [argument for name in TRAVEL for argument in (_SIDES if name == "window" else (name,))]


def schema(layout: type[Layout]) -> str:
    """The arguments of an operator for calls of a layout."""
    fields = {"q": Tensor, "k": Tensor, "v": Tensor, **get_type_hints(layout)}
    own = [f"{TYPES[kind]} {name}" for name, kind in fields.items()]
    options = [f"{_option_type(name)} {name}" for name in NAMES]
    return ", ".join(own + options)


def _option_type(name: str) -> str:
    if name in _SIDES:
        assert _HINTS["window"] == Window
        return "SymInt?"
    return TYPES[_HINTS[name]]


def sent(values: dict[str, Any]) -> list[Any]:
    """Checked options, by their names, as arguments of an operator."""
    arguments: list[Any] = []
    for name in TRAVEL:
        value = values[name]
        if name == "window":
            arguments += value
        elif name in CONFIGS:
            arguments.append(None if value is None else value.short_form())
        else:
            arguments.append(value)
    return arguments


def received(arguments: tuple[Any, ...], out: Tensor | None) -> Options:
    """The options that an operator was given, with the output that it is to write."""
    values = dict(zip(NAMES, arguments, strict=True))
    values["window"] = tuple(values.pop(side) for side in _SIDES)
    for name in CONFIGS:
        if values[name] is not None:
            values[name] = _parsed(values[name])
    return Options(**values, out=out)


@functools.cache
def _parsed(name: str) -> KernelConfig:
    return parse_kernel_name_into_config(name)
