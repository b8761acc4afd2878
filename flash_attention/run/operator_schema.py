"""Arguments of the operators, in the order in which layouts and options declare them.

An operator takes q, k, v, the fields of a layout, then the options that travel, tensors first, then what
``score_mod`` and ``mask_mod`` do. A window travels as two numbers, a configuration as its name, a mod as its
text. The operators are of one library of ``torch.library``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from flash_attention.layouts import Layout
from flash_attention.mods.tracing import Traced
from flash_attention.options import Options
from flash_helpers.kernels.kernel import BackwardConfig, ForwardConfig, KernelConfig
from flash_helpers.kernels.parsing import parse_kernel_name_into_config
from flash_helpers.kernels.problem import Window
from flash_helpers.mods.encoding import decoded, encoded
from flash_helpers.mods.mod import Number

# out is an argument of operators of its own, the backend has been checked, functions travel as what they do
# (``SentMod``), and operators draw no numbers.
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
    return ", ".join((*own, *options, MOD_SCHEMA))


def _option_type(name: str) -> str:
    if name in _SIDES:
        assert _HINTS["window"] == Window
        return "SymInt?"
    return TYPES[_HINTS[name]]


def sent(values: dict[str, Any], mod: SentMod) -> list[Any]:
    """Checked options, by their names, and a mod as arguments of an operator."""
    arguments: list[Any] = []
    for name in TRAVEL:
        value = values[name]
        if name == "window":
            arguments += value
        elif name in CONFIGS:
            arguments.append(None if value is None else value.short_form())
        else:
            arguments.append(value)
    return [*arguments, *mod]


def received(arguments: tuple[Any, ...], out: Tensor | None) -> tuple[Options, Traced | None]:
    """The options that an operator was given, with the output that it is to write, and its mod."""
    mod = SentMod(*arguments[len(NAMES) :])
    values = dict(zip(NAMES, arguments[: len(NAMES)], strict=True))
    values["window"] = tuple(values.pop(side) for side in _SIDES)
    for name in CONFIGS:
        if values[name] is not None:
            values[name] = _parsed(values[name])
    return Options(**values, out=out), mod.traced()


# ---------------------------------------------------------------------- mods
class SentMod(NamedTuple):
    """What functions of scores and masks do, as arguments of an operator.

    Attributes:
        mod: its text (``flash_helpers.mods.encoding``); None: there are no functions.
        captured: the tensors that it captured.
        whole_numbers, real_numbers: the numbers that it captured, in the mod's order.
    """

    mod: str | None
    captured: list[Tensor]
    whole_numbers: list[int]
    real_numbers: list[float]

    @classmethod
    def of(cls, traced: Traced | None) -> SentMod:
        """That of a recorded mod."""
        if traced is None:
            return cls(None, [], [], [])
        typed = list(zip(traced.mod.numbers, traced.numbers, strict=True))
        whole = [x if isinstance(x, torch.SymInt) else int(x) for kind, x in typed if kind is not Number.REAL]
        real = [float(x) for kind, x in typed if kind is Number.REAL]
        return cls(encoded(traced.mod), list(traced.tensors), whole, real)

    def traced(self) -> Traced | None:
        """The mod with what it captured.

        Raises:
            ValueError: the text and what is captured do not fit.
        """
        if self.mod is None:
            return None
        mod = decoded(self.mod)
        n_real = sum(kind is Number.REAL for kind in mod.numbers)
        has = len(self.captured), len(self.whole_numbers), len(self.real_numbers)
        wants = len(mod.tensors), len(mod.numbers) - n_real, n_real
        if has != wants:
            raise ValueError(
                f"the mod takes {wants[0]} tensors, {wants[1]} whole and {wants[2]} real numbers, and is "
                f"given {has[0]}, {has[1]} and {has[2]}"
            )
        whole, real = iter(self.whole_numbers), iter(self.real_numbers)
        numbers = tuple(next(real if kind is Number.REAL else whole) for kind in mod.numbers)
        return Traced(mod, numbers, tuple(self.captured))


MOD_SCHEMA = "str? mod, Tensor[] captured, SymInt[] whole_numbers, float[] real_numbers"


@functools.cache
def _parsed(name: str) -> KernelConfig:
    return parse_kernel_name_into_config(name)
