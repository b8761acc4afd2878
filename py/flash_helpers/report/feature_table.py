"""The Markdown table of a result file of ``python -m flash_helpers.benchmark.features``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flash_helpers.benchmark.results import ResultFileError
from flash_helpers.content import CONTENT_ERRORS, amount, read_json, typed

OURS = "ours"  # this library's name among the contestants of that benchmark


def feature_table(path: Path) -> str:
    """A line a problem: our time and rate, and the others' times over ours; then on what it was measured.

    A single query over a cache has the bytes of K and V a second for a rate, as a share of a copy's.

    Raises:
        ResultFileError: it can't be read, or is no such file.
    """
    try:
        document = read_json(path)
        rows, copied = document["rows"], document["copy_bytes_per_second"]
        names = [n for n in dict.fromkeys(n for row in rows for n in row["milliseconds"]) if n != OURS]
        header = ["", "problem", "us", "rate", *(f"{name} / ours" for name in names)]
        lines = [_line(row, copied, names) for row in rows if OURS in row["milliseconds"]]
        facts, copied = typed(document, "environment", dict), amount(copied)
    except (OSError, *CONTENT_ERRORS) as error:
        raise ResultFileError(
            f"{path} can't be read as a result file of flash_helpers.benchmark.features: {error!r}; measure "
            "again"
        ) from error
    shown = [str(facts.get("gpu")), *(f"{n} {facts[n]}" for n in ("driver", "cuda", "torch") if facts.get(n))]
    shown += [f"commit {facts['git_commit']}"] if facts.get("git_commit") else []
    table = [header, ["---", "---", *["--:"] * (len(header) - 2)], *lines]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
    return f"{text}\n\n_{'; '.join(shown)}; copy {copied / 1e9:.0f} GB/s read and written_"


def _line(row: Mapping[str, Any], copied: float, names: list[str]) -> list[str]:
    from flash_helpers.benchmark.cases import Case  # imports torch

    case = Case(**{**row["case"], "lengths": tuple(row["case"]["lengths"])})
    own = row["milliseconds"][OURS]["median"]
    if case.feature == "decode":
        rate = f"{100 * case.cache_bytes() / (own * 1e-3) / copied:.0f} % of a copy"
    else:
        rate = f"{case.flop() / (own * 1e-3) / 1e12:.0f} TFLOP/s"
    times = row["milliseconds"]
    ratios = [f"{times[name]['median'] / own:.2f}" if name in times else "" for name in names]
    return [case.feature, row["label"], f"{1e3 * own:.1f}", rate, *ratios]
