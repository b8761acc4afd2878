"""What a direction runs for a problem on a device where nothing was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from flash_helpers.kernels.problem import AttentionProblem

Default = tuple[Any, str]
"""(configuration, reason)."""

# Blocks of 192 and 256 queries take up to a sixth less time than those of 128, where all rows are queries
# (head size 64, H200, h200-row-candidates.json): so many more rows still pay.
MAX_MORE_ROWS = 1.15


class TableRow(Protocol):
    """A row of a table of choices."""

    @property
    def config(self) -> Any: ...
    @property
    def reason(self) -> str: ...


Row = TypeVar("Row", bound=TableRow)


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


def rows_of_blocks(n_queries: int, B_r: int) -> int:
    """Rows that the blocks of a sequence compute, those behind its end too."""
    return -(-n_queries // B_r) * B_r


def are_filled(n_queries: int, B_r: int, heights: Iterable[int]) -> bool:
    """Whether blocks compute no more rows than shorter ones among ``heights``, beyond what tall ones gain."""
    least = min((rows_of_blocks(n_queries, height) for height in heights if height < B_r), default=None)
    return least is None or rows_of_blocks(n_queries, B_r) <= MAX_MORE_ROWS * least


def first_filled(fitting: Sequence[Row], n_queries: int) -> tuple[Row, str]:
    """The first row of a table whose blocks the queries of a sequence fill, and why.

    Tables name the tallest blocks that pay where all of their rows are queries. A row gives way where shorter
    blocks of another one that fits compute fewer rows, by more than tall blocks gain.

    Args:
        fitting: the rows that were made for the problem, in the order of the table.
        n_queries: of a sequence; of packed ones, of the longest.
    """
    heights = {choice.config.B_r for choice in fitting}
    chosen = next(choice for choice in fitting if are_filled(n_queries, choice.config.B_r, heights))
    if chosen is fitting[0]:
        return chosen, chosen.reason
    tall, own = fitting[0].config.B_r, chosen.config.B_r
    empty = f"blocks of {tall} rows would compute {rows_of_blocks(n_queries, tall)} for {n_queries} queries"
    return chosen, f"{empty}, these {rows_of_blocks(n_queries, own)}: {chosen.reason}"


def gathering_reason(problem: AttentionProblem) -> str:
    """What a reason says of gradients of captured tensors, which cost more than the kernel that is chosen."""
    if not problem.captured_gradients:
        return ""
    return "gradients of captured tensors are summed by two more passes over all scores; "
