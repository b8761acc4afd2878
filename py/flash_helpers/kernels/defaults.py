"""What a direction runs for a problem on a device where nothing was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flash_helpers.kernels.problem import AttentionProblem

Default = tuple[Any, str]
"""(configuration, reason)."""


@dataclass(frozen=True)
class Defaults:
    """The defaults of one direction for one problem.

    Attributes:
        whole: where a block takes all keys of its rows.
        split: where the keys of a block are shared by several blocks.
        place: among the directions: the least is expected to be the fastest.
        in_parts: keys may be cut into parts. Where ``whole`` has small blocks for want of large ones, what
            combines the parts costs more than they gain.
    """

    whole: Default
    split: Default
    place: int
    in_parts: bool = True


def size_for(problem: AttentionProblem, sizes: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """The smallest of some (d_head, d_head_v) that hold the problem's; None where none does."""
    holding = (s for s in sizes if s[0] >= problem.d_head and s[1] >= problem.d_head_v)
    return min(holding, default=None)
