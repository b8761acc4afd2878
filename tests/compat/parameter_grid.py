"""The parameters of a test function, and a sample of them that is the same in every run.

FlashAttention's grids have up to some 300,000 cases a function: too many to run, and to make pytest items of.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

Case = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """What is run of one test function.

    Attributes:
        name: of the function.
        function: the function.
        size: cases of its whole grid.
        cases: those to be run, in a random order that does not change.
        outside: cases whose argument the library refuses, by that argument's name: how many the grid has.
        refused: some of those, for which the refusal is to be seen: (argument, case).
    """

    name: str
    function: Callable[..., None]
    size: int
    cases: list[Case]
    outside: dict[str, int]
    refused: list[tuple[str, Case]]


def grid(function: Callable[..., None]) -> list[Case]:
    """Every case of the function's ``pytest.mark.parametrize``."""
    axes = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
            names = [name.strip() for name in names]
            axes.append([dict(zip(names, v if len(names) > 1 else (v,), strict=True)) for v in mark.args[1]])
    return [{name: value for part in parts for name, value in part.items()} for parts in product(*axes)]


def sample(
    name: str,
    function: Callable[..., None],
    n_cases: int,
    n_refused: int,
    outside: Callable[[Case], list[str]],
    wanted: Callable[[Case], bool] = lambda case: True,
) -> Sample:
    """Chooses what is run of a function.

    Args:
        n_cases: at most so many cases that the library is to compute.
        n_refused: at most so many of each refused argument.
        outside: the arguments for which the library refuses a case. Of several nobody knows which is named.
        wanted: cases for which it is false are left out.
    """
    cases = grid(function)
    random.Random(name).shuffle(cases)
    inside, refused, count = [], [], Counter[str]()
    for case in cases:
        arguments = outside(case)
        count.update(arguments[:1])
        if not wanted(case):
            continue
        if not arguments:
            inside.append(case)
        elif len(arguments) == 1 and sum(a == arguments[0] for a, _ in refused) < n_refused:
            refused.append((arguments[0], case))
    return Sample(name, function, len(cases), inside[:n_cases], dict(count), refused)
