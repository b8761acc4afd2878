"""The Markdown table of a result file of ``python -m flash_helpers.benchmark.features``, or ``.grid``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flash_helpers.benchmark.result_file import CHOICE, FORWARD, ResultFile, ResultFileError
from flash_helpers.content import CONTENT_ERRORS, ContentError, amount

FEATURES, GRID = "features", "grid"
MODES = ("hot", "cold")  # a row has one of them


def feature_table(path: Path) -> str:
    """A line a problem: our time and rate, and the others' times over ours; then on what it was measured.

    A single query over a cache has the bytes of K and V a second for a rate, as a share of a copy's. A grid
    also says why others have no time.

    Raises:
        ResultFileError: it can't be read, or is no such file.
    """
    try:
        file = ResultFile.load(path)
        if file.benchmark not in (FEATURES, GRID):
            raise ContentError(f"its benchmark is {file.benchmark!r}")
        copied = amount(file.facts["copy_bytes_per_second"])
        cells = times_by_case(file)
        names = [n for n in dict.fromkeys(n for times in cells.values() for n in times) if n != CHOICE]
        header = ["", "problem", "us", "rate", *(f"{name} / ours" for name in names)]
        lines = [_line(case, times, copied, names) for case, times in cells.items() if CHOICE in times]
    except CONTENT_ERRORS as error:
        raise ResultFileError(
            f"{path} can't be read as a result file of flash_helpers.benchmark.features or .grid: {error}; "
            "measure again"
        ) from error
    facts = file.environment
    shown = [str(facts.get("gpu")), *(f"{n} {facts[n]}" for n in ("driver", "cuda", "torch") if facts.get(n))]
    shown += [f"commit {facts['git_commit']}"] if facts.get("git_commit") else []
    table = [header, ["---", "---", *["--:"] * (len(header) - 2)], *lines]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
    text += f"\n\n_{'; '.join(shown)}; copy {copied / 1e9:.0f} GB/s read and written_"
    return text if file.benchmark == FEATURES else f"{text}\n\n{_missing(file)}"


def _missing(file: ResultFile) -> str:
    """A line for each implementation and reason why it has no time, with the features concerned."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for row in file.rows:
        if row.get("status", "ok") != "ok":
            said = "" if row["status"] == "unavailable" else f"{row['status']}: "
            reason = (row["implementation"], said + row.get("reason", ""))
            found.setdefault(reason, {})[row["feature"]] = None
    lines = [f"- {name}: {reason} ({', '.join(features)})" for (name, reason), features in found.items()]
    return "\n".join(["Without a time:", "", *lines]) if lines else "Everybody has a time in every row."


def times_by_case(file: ResultFile) -> dict[Any, dict[str, float]]:
    """Case to {implementation: milliseconds}, in the file's order."""
    from flash_helpers.benchmark.cases import Case  # imports torch

    found: dict[Any, dict[str, float]] = {}
    for row in file.rows:
        case = Case.from_json(row["feature"], row["problem"], row.get("direction", FORWARD))
        times = found.setdefault(case, {})
        for mode in MODES:
            if mode in row["milliseconds"]:
                times[row["implementation"]] = row["milliseconds"][mode]["median"]
    return found


def _line(case: Any, times: Mapping[str, float], copied: float, names: list[str]) -> list[str]:
    own = times[CHOICE]
    if case.feature == "decode":
        rate = f"{100 * case.cache_bytes() / (own * 1e-3) / copied:.0f} % of a copy"
    else:
        rate = f"{case.flop() / (own * 1e-3) / 1e12:.0f} TFLOP/s"
    ratios = [f"{times[name] / own:.2f}" if name in times else "" for name in names]
    return [case.feature, case.label(), f"{1e3 * own:.1f}", rate, *ratios]
