"""The Markdown table of who leads in a result file of ``python -m flash_helpers.benchmark.grid``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from flash_helpers.benchmark.result_file import CHOICE, FORWARD, ResultFile, ResultFileError
from flash_helpers.content import CONTENT_ERRORS, ContentError
from flash_helpers.report.feature_table import GRID, times_by_case

REPEATABLE = f"{CHOICE}, repeatable"
PASSES = {FORWARD: "", "backward": "gradients", "both": "both passes"}


def lead_table(path: Path) -> str:
    """A line a feature and pass: the best peer's time over ours, its mean and its lowest row.

    Where the library's repeatable gradients were measured, also our default's time over theirs. A sentence
    below counts the rows.

    Raises:
        ResultFileError: it can't be read, or is no such file.
    """
    try:
        file = ResultFile.load(path)
        if file.benchmark != GRID:
            raise ContentError(f"its benchmark is {file.benchmark!r}")
        cells = times_by_case(file)
        peers = {row["implementation"] for row in file.rows if row["kind"] == "peer"}
    except CONTENT_ERRORS as error:
        raise ResultFileError(
            f"{path} can't be read as a result file of flash_helpers.benchmark.grid: {error}; measure again"
        ) from error
    ratios = {case: _over(times, peers) for case, times in cells.items() if CHOICE in times}
    found = {case: one for case, one in ratios.items() if one is not None}
    if not found:
        raise ResultFileError(f"{path} holds no row of this library and a peer; measure beside one")
    repeatable = {c: t[CHOICE] / t[REPEATABLE] for c, t in cells.items() if {CHOICE, REPEATABLE} <= set(t)}
    header = ["", "rows", "best / ours, mean", "lowest", "problem", "by"]
    header += ["repeatable, mean", "lowest"] if repeatable else []
    lines = [header, ["---", "--:", "--:", "--:", "---", "---", *["--:"] * (len(header) - 6)]]
    for kind in dict.fromkeys(map(_kind, found)):
        mine = [case for case in found if _kind(case) == kind]
        line = _line(kind, [(found[case], case) for case in mine])
        lines.append(
            line + (_repeatable([repeatable[c] for c in mine if c in repeatable]) if repeatable else [])
        )
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    every = [ratio for ratio, _ in found.values()]
    text = (
        f"{sum(ratio >= 1 for ratio in every)} of {len(every)} rows at or above 1, geometric mean "
        f"{geometric_mean(every):.3f}, the lowest {min(every):.3f}"
    )
    if repeatable:
        text += f"; repeatable gradients {geometric_mean(repeatable.values()):.3f} of the default's speed"
    return f"{table}\n\n{text}."


def _over(times: dict[str, float], peers: set[str]) -> tuple[float, str] | None:
    """The best peer's time over ours, and who it is; None: no peer has a time."""
    theirs = [(times[name] / times[CHOICE], name) for name in times if name in peers]
    return min(theirs, default=None)


def _kind(case: Any) -> tuple[str, str]:
    return case.feature, PASSES[case.direction]


def _line(kind: tuple[str, str], rows: Sequence[tuple[tuple[float, str], Any]]) -> list[str]:
    (lowest, name), case = min(rows, key=lambda row: row[0])
    mean = geometric_mean([ratio for (ratio, _), _ in rows])
    title = ", ".join(part for part in kind if part)
    return [title, str(len(rows)), f"{mean:.3f}", f"{lowest:.3f}", case.label(), name]


def _repeatable(ratios: Sequence[float]) -> list[str]:
    return [f"{geometric_mean(ratios):.3f}", f"{min(ratios):.3f}"] if ratios else ["", ""]
