"""Recording ``score_mod`` and ``mask_mod``: each is called once; together they become one mod."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attention.errors import ModError
from flash_attention.mods import composed_rules, conversion_rules, rules
from flash_attention.mods.captured import opened
from flash_attention.mods.operands import operand
from flash_attention.mods.recording import Recording
from flash_attention.mods.refusal import line_of
from flash_attention.mods.symbols import Symbol
from flash_helpers.mods.mod import Mod
from flash_helpers.mods.operations import INDICES, Kind

RULES_OF = (rules, composed_rules, conversion_rules)  # importing them fills the table
SIGNATURES = {
    "score_mod": ("score", *INDICES),
    "mask_mod": INDICES,
}
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
    return torch.compiler.disable(_traced)  # type: ignore[no-any-return]


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
        returned = opened(function)(*symbols)
    except ModError as error:
        raise ModError(f"{name} {_name(function)} cannot be recorded: {error}") from None
    except Exception as error:
        line = line_of(error)
        raised = f"{type(error).__name__}: {error}" + (f", at {line}" if line else "")
        raise ModError(
            f"{name} {_name(function)} raised {raised}. It is called once, as {_WRITTEN[name]} "
            "with symbols in place of values, before anything is computed"
        ) from error
    return _result(recording, name, function, returned, kind)


def not_callable(name: str, function: object) -> str:
    """What is wrong with what is given in the place of a function."""
    return f"{name} is a {type(function).__name__}; it must be a function {_WRITTEN[name]}, or None"


def _result(recording: Recording, name: str, function: Any, returned: Any, kind: Kind) -> int:
    wanted = "a number, the new score" if kind is Kind.FLOAT else "a bool, whether the query sees the key"
    if not isinstance(returned, Symbol | Tensor | bool | int | float):
        raise ModError(
            f"{name} {_name(function)} returns a {type(returned).__name__}; it must return {wanted}"
        )
    try:
        place, length = operand(recording, returned)
    except ModError as error:
        raise ModError(f"{name} {_name(function)} cannot be recorded: {error}") from None
    if length is not None:
        raise ModError(
            f"{name} {_name(function)} returns a row of {length} values; it must return {wanted}: reduce it, "
            "e.g. with .any(dim=-1) or .sum(dim=-1)"
        )
    have = recording.builder.kind(place)
    if (have is Kind.BOOL) is not (kind is Kind.BOOL):
        given = "a bool" if have is Kind.BOOL else "a number"
        remedy = (
            "compare it with something" if kind is Kind.BOOL else "write torch.where(condition, score, other)"
        )
        raise ModError(f"{name} {_name(function)} returns {given}; it must return {wanted}: {remedy}")
    return recording.builder.convert(place, kind)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
