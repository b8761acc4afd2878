"""Recording ``score_mod`` and ``mask_mod``: each is called once; together they become one mod."""

from __future__ import annotations

import functools
import numbers
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_attention.errors import ModError
from flash_attention.mods import activation_rules, composed_rules, conversion_rules, rules
from flash_attention.mods.captured import opened
from flash_attention.mods.draws import NoDraws
from flash_attention.mods.operands import operand
from flash_attention.mods.recording import TOO_LARGE, Recording
from flash_attention.mods.refusal import line_of, line_of_definition, mod_error
from flash_attention.mods.symbols import Symbol
from flash_helpers.messages import named_type
from flash_helpers.mods.builder import TooLargeError
from flash_helpers.mods.mod import Mod
from flash_helpers.mods.operations import INDICES, Kind

RULES_OF = (rules, composed_rules, activation_rules, conversion_rules)  # importing them fills the table
SIGNATURES = {
    "score_mod": ("score", *INDICES),
    "mask_mod": INDICES,
}
_INDEXED = {"score_mod": "bias[h, q_idx, kv_idx]", "mask_mod": "mask[q_idx, kv_idx]"}
_WRITTEN = {"score_mod": "score_mod(score, b, h, q_idx, kv_idx)", "mask_mod": "mask_mod(b, h, q_idx, kv_idx)"}


@dataclass(frozen=True, eq=False)
class Traced:
    """A mod with the values that its functions captured.

    Attributes:
        mod: what is computed; results ``score`` and ``visible``, as far as there is a function for them.
        numbers: the captured numbers, in the mod's order.
        tensors: the captured tensors.
        reads_values: a number of it was read from a tensor.
    """

    mod: Mod
    numbers: tuple[int | float, ...]
    tensors: tuple[Tensor, ...]
    reads_values: bool = False

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Traced:
        """The same with other tensors of the same types, in the same order."""
        return Traced(self.mod, self.numbers, tensors)


def trace(
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    device: torch.device | str | None = None,
) -> Traced:
    """Calls each function once, with symbols, and gives what they did.

    Args:
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, the new score; None: scores stay.
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)``, whether the query sees the key; None: all are seen.
        device: where captured tensors must be; None: anywhere.

    Raises:
        ModError: a function does what cannot be recorded; the message has its line and what to write instead.
        TypeError: no function.
    """
    if "torch._dynamo" in sys.modules:  # which follows this call where it has given up the caller
        return _unwatched()(score_mod, mask_mod, device)
    return _traced(score_mod, mask_mod, device)


@functools.cache
def _unwatched() -> Callable[..., Traced]:
    """The same where nothing is compiled: neither the caller, nor what ``torch.compile`` has made."""
    stance = getattr(torch.compiler, "set_stance", None)  # from torch 2.6 on

    def traced(*given: Any) -> Traced:
        with nullcontext() if stance is None else stance("force_eager"):
            return _traced(*given)

    return torch.compiler.disable(traced)  # type: ignore[no-any-return]


def _traced(score_mod: Any, mask_mod: Any, device: torch.device | str | None) -> Traced:
    recording = Recording(None if device is None else torch.device(device))
    results: dict[str, int] = {}
    for name, function, kind in (("score_mod", score_mod, Kind.FLOAT), ("mask_mod", mask_mod, Kind.BOOL)):
        if function is not None:
            results["score" if kind is Kind.FLOAT else "visible"] = _recorded(recording, name, function, kind)
    builder = recording.builder
    mod = builder.finish(results)
    return Traced(
        mod,
        tuple(recording.numbers[slot] for slot in builder.number_slots),
        tuple(recording.tensors[slot] for slot in builder.tensor_slots),
        recording.reads_values,
    )


def _recorded(recording: Recording, name: str, function: Any, kind: Kind) -> int:
    if not callable(function):
        raise TypeError(not_callable(name, function))
    symbols = [Symbol(recording, recording.builder.leaf(leaf)) for leaf in SIGNATURES[name]]
    try:
        with NoDraws():
            returned = opened(function)(*symbols)
    except ModError as error:
        raise _refused(name, function, f"cannot be recorded: {error}", *error.quoted) from None
    except TooLargeError as error:
        raise _too_large(name, function, error) from None
    except Exception as error:
        line = line_of(error) or line_of_definition(function)
        raised = f"{type(error).__name__}: {error}" + (f", at {line}" if line else "")
        text = f"raised {raised}. It is called once, as {_WRITTEN[name]}"
        text += " with symbols in place of values, before anything is computed"
        raise _refused(name, function, text, raised) from error
    try:
        return _result(recording, name, function, returned, kind)
    except TooLargeError as error:
        raise _too_large(name, function, error) from None


def _too_large(name: str, function: Any, error: TooLargeError) -> ModError:
    what, remedy = TOO_LARGE
    line = line_of(error) or line_of_definition(function)
    return _refused(
        name, function, f"cannot be recorded: {what}{f', at {line}' if line else ''}. {remedy}", line
    )


def not_callable(name: str, function: object) -> str:
    """What is wrong with what is given in the place of a function."""
    must = f"it must be a function {_WRITTEN[name]}, or None"
    if type(function).__name__ == "BlockMask":
        of_scores = name == "score_mod"
        made = "Pass it as mask_mod" if of_scores else "flash_attention.mods.mask_of_blocks makes one of it"
        return f"{name} is a BlockMask; {must}. {made}"
    if not isinstance(function, Tensor):
        return f"{name} is {function!r:.60}; {must}"
    given = f"a tensor of shape {tuple(function.shape)} and {function.dtype}"
    made = "dense_mask(mask)" if name == "mask_mod" else "dense_bias(bias)"
    return f"{name} is {given}; {must}. Of a whole tensor flash_attention.mods.{made} makes one"


def _refused(name: str, function: Any, text: str, *quoted: str) -> ModError:
    """The error for a function; its name and the parts ``quoted`` of the text are the user's words."""
    called = getattr(function, "__qualname__", None) or type(function).__name__
    own = f"{called} {text.partition(' ')[0]}"
    return mod_error(f"{name} {called} {text}", own, *quoted)


def _result(recording: Recording, name: str, function: Any, returned: Any, kind: Kind) -> int:
    wanted = "a number, the new score" if kind is Kind.FLOAT else "a bool, whether the query sees the key"

    def wrong(given: str, remedy: str = "") -> ModError:
        line = line_of_definition(function)
        text = f"returns {given}{f', at {line}' if line else ''}; it must return {wanted}"
        return _refused(name, function, text + (f": {remedy}" if remedy else ""), line)

    if not isinstance(returned, Symbol | Tensor | np.bool_ | numbers.Real):
        raise wrong(named_type(returned))
    if isinstance(returned, Tensor) and returned.ndim:
        raise wrong(f"a whole tensor of shape {tuple(returned.shape)}", f"index it, e.g. {_INDEXED[name]}")
    try:
        place, length = operand(recording, returned)
    except ModError as error:
        raise _refused(name, function, f"cannot be recorded: {error}", *error.quoted) from None
    if length is not None:
        raise wrong(f"a row of {length} values", "reduce it, e.g. with .any(dim=-1) or .sum(dim=-1)")
    have = recording.builder.kind(place)
    if (have is Kind.BOOL) is not (kind is Kind.BOOL):
        given = "a bool" if have is Kind.BOOL else "a number"
        remedy = (
            "compare it with something" if kind is Kind.BOOL else "write torch.where(condition, score, other)"
        )
        raise wrong(given, remedy)
    return recording.builder.convert(place, kind)
