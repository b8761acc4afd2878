"""What is no layout, and what no constructor of one takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flash_attention.checks.options import given


def check_count(name: str, value: int, least: int = 1) -> None:
    """A whole number."""
    if type(value) is not int or value < least:
        error = ValueError if type(value) is int else TypeError
        raise error(f"{name} is {given(value)}; it must be an int, at least {least}")


def check_kinds(ranks: object, documents: object) -> None:
    """Tuples, as the constructors make them: layouts are keys of dictionaries."""
    of_ranks = ranks if isinstance(ranks, tuple) else (ranks,)
    wrong = [runs for runs in of_ranks if not isinstance(runs, tuple)]
    if wrong:
        raise TypeError(
            f"ranks has {given(wrong[0])}; it must be a tuple with a tuple of ranges for each rank: "
            "Layout.explicit makes them of positions"
        )
    for r in (r for runs in of_ranks for r in runs):
        if not isinstance(r, range) or not r or r.step < 1:
            error = ValueError if isinstance(r, range) else TypeError
            raise error(
                f"ranks has {given(r)}; it must hold ranges of positions that grow, none of them empty"
            )
    if not of_ranks:
        raise ValueError("the layout has no rank; give world, the number of ranks, as at least 1")
    if documents is not None and not (
        isinstance(documents, tuple) and all(type(x) is int for x in documents)
    ):
        raise TypeError(f"documents is {given(documents)}; it must be a tuple of integers, or None")


def check_sizes(total: int, world: int) -> None:
    """Rows and ranks."""
    check_count("total", total, 0)
    check_count("world", world)


def checked_documents(documents: Iterable[int] | Tensor | None) -> tuple[int, ...] | None:
    """0 and the ends of documents; None: there are none."""
    if documents is None:
        return None
    if not isinstance(documents, Iterable):
        raise TypeError(
            f"documents is {given(documents)}; it must be integers in a list or a tensor, or None"
        )
    numbers = tuple(checked_numbers("documents", documents))
    if not numbers:
        raise ValueError("documents is empty; it must be 0 and the end of each document, or None")
    return numbers


def checked_numbers(name: str, values: Iterable[int] | Tensor) -> list[int]:
    """Integers of a list or a tensor."""
    if isinstance(values, Tensor):
        if values.ndim != 1 or values.is_floating_point() or values.dtype is torch.bool:
            raise TypeError(
                f"{name} has a tensor {tuple(values.shape)} of {values.dtype}; it must be one row of integers"
            )
        return values.tolist()
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} has {given(values)}; it must be integers in a list or a tensor")
    numbers = list(values)
    wrong = [x for x in numbers if type(x) is not int]
    if wrong:
        raise TypeError(f"{name} has {given(wrong[0])}; it must hold integers alone")
    return numbers


def check_each_once(ranks: tuple[tuple[range, ...], ...], total: int) -> None:
    """Each position belongs to one row of one rank."""
    runs = sorted((r for of_rank in ranks for r in of_rank), key=lambda r: r.start)
    if sum(map(len, runs)) == total and all(r.step == 1 for r in runs):
        ends = [0, *(r.stop for r in runs)]
        if all(r.start == end for r, end in zip(runs, ends, strict=False)):
            return
    seen: set[int] = set()
    for r in runs:
        outside = [x for x in (r[0], r[-1]) if not 0 <= x < total]
        if outside:
            raise ValueError(f"position {outside[0]} is none of 0 to {total - 1}, of which there are {total}")
        again = seen.intersection(r)
        if again:
            raise ValueError(f"position {min(again)} belongs to two rows; each must belong to one")
        seen.update(r)
    if len(seen) != total:
        missing = next(i for i in range(total) if i not in seen)
        raise ValueError(
            f"position {missing} belongs to no rank; each of 0 to {total - 1} must belong to one"
        )


def short(numbers: Sequence[int]) -> str:
    """The first of some numbers, for a message."""
    text = ", ".join(map(str, numbers[:8]))
    return f"({text}{', …' if len(numbers) > 8 else ''})"
