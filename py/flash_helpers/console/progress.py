"""How far long work has come: bars on a terminal, a plain line now and then where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

LINE_SECONDS = 10.0  # between two plain lines of one kind of work, so that a log stays readable


class Show(Protocol):
    """Tells how far one kind of work has come."""

    def __call__(self, work: str, done: int, total: int | None, text: str = "") -> None:
        """``done`` of ``total`` parts (None: not known yet) are finished; ``text`` says what is going on."""


@contextmanager
def shown_progress(console: Console, clock: Callable[[], float] = time.monotonic) -> Iterator[Show]:
    """Gives a function that shows progress on ``console``: a bar for each kind of work, or lines."""
    if not console.is_terminal:
        yield _Lines(console, clock)
        return
    # The text gets what is left of the line: bar, count and time stay whole however long a kernel's name is.
    whole, rest = Column(no_wrap=True), Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = (
        TextColumn("{task.description}", table_column=whole), BarColumn(20, table_column=whole.copy()),
        MofNCompleteColumn(table_column=whole.copy()), TimeElapsedColumn(table_column=whole.copy()),
        TextColumn("{task.fields[last]}", markup=False, table_column=rest),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        tasks: dict[str, int] = {}

        def show(work: str, done: int, total: int | None, text: str = "") -> None:
            if work not in tasks:
                tasks[work] = progress.add_task(work, total=total, last=text)
            progress.update(progress.tasks[tasks[work]].id, completed=done, total=total, last=text)

        yield show


class _Lines:
    """One line for the first and the last part of each kind of work, and one each ``LINE_SECONDS``."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._start = clock()
        self._shown_at: dict[str, float] = {}

    def __call__(self, work: str, done: int, total: int | None, text: str = "") -> None:
        now = self._clock()
        if done != total and now - self._shown_at.get(work, float("-inf")) < LINE_SECONDS:
            return
        self._shown_at[work] = now
        of = "" if total is None else f" of {total}"
        line = f"{now - self._start:6.1f} s  {work} {done}{of}  {text}".rstrip()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
