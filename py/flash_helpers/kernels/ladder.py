"""A ladder: configurations of one family that lead from a plain kernel to a fast one, one idea a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

Config = TypeVar("Config")


@dataclass(frozen=True)
class Step:
    """What one step adds.

    Attributes:
        idea: a few words.
        why: what it should bring; what it did bring is measured (``flash-attention ladder``).
        changes: the fields it sets.
        causal: for kernels with a causal mask only, for others only, or (None) for both.
        bf16_only: FP16 can't take it, or has no registers for it.
    """

    idea: str
    why: str
    changes: Mapping[str, Any]
    causal: bool | None = None
    bf16_only: bool = False


@dataclass(frozen=True)
class Rung(Generic[Config]):
    """A step and the configuration that stands on it.

    Attributes:
        step: what was added last.
        config: all of it.
    """

    step: Step
    config: Config


def climb(start: Config, steps: Sequence[Step], causal: bool, bf16: bool) -> list[Rung[Config]]:
    """The configurations of a ladder for one mask, each with the changes of all steps up to its own."""
    rungs = []
    for step in steps:
        if step.causal not in (None, causal) or (step.bf16_only and not bf16):
            continue
        start = replace(start, **step.changes)  # type: ignore[type-var]
        rungs.append(Rung(step, start))
    return rungs
