"""The table of who leads in a grid's result file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flash_helpers.benchmark.cases import Case
from flash_helpers.benchmark.result_file import ResultFile, ResultFileError
from flash_helpers.report.lead_table import REPEATABLE, lead_table
from flash_helpers.report.readme import update_readme

WINDOW = Case("window", 1, 8192, 8192, 16, 16, causal=True, window=128)
LONGER = replace(WINDOW, window=1024)
BACKWARD = replace(WINDOW, direction="backward")
BOTH = replace(WINDOW, direction="both")


def row(case: Case, name: str, milliseconds: float | None) -> dict[str, Any]:
    timed = {"hot": {"median": milliseconds}} if milliseconds else {}
    said = {} if milliseconds else {"status": "unavailable", "reason": "no windows"}
    made = {
        "implementation": name, "kind": "kernel" if name.startswith("attention") else "peer",
        "feature": case.feature, "problem": case.to_json(), "milliseconds": timed, **said,
    }  # fmt: skip
    return made if case.direction == "forward" else {**made, "direction": case.direction}


def saved(path: Path, rows: list[dict[str, Any]], benchmark: str = "grid") -> Path:
    ResultFile(benchmark, "for a test", rows).save(path)
    return path


def test_a_line_a_feature_and_pass(tmp_path: Path) -> None:
    rows = [
        row(WINDOW, "attention", 2.0), row(WINDOW, "fa3", 3.0), row(WINDOW, "fa4", 2.5),
        row(WINDOW, "cudnn", None),
        row(LONGER, "attention", 4.0), row(LONGER, "fa4", 3.2),
        row(BACKWARD, "attention", 1.0), row(BACKWARD, "fa4", 1.1), row(BACKWARD, REPEATABLE, 1.25),
        row(BOTH, "attention", 2.0), row(BOTH, REPEATABLE, 2.0), row(BOTH, "fa4", 3.0),
        row(replace(WINDOW, feature="alone"), "attention", 1.0),
    ]  # fmt: skip
    lines = lead_table(saved(tmp_path / "grid.json", rows)).splitlines()
    assert lines[2:5] == [
        "| window | 2 | 1.000 | 0.800 | b1 s8192 h16 window 1024 | fa4 |  |  |",
        f"| window, gradients | 1 | 1.100 | 1.100 | {BACKWARD.label()} | fa4 | 0.800 | 0.800 |",
        f"| window, both passes | 1 | 1.500 | 1.500 | {BOTH.label()} | fa4 | 1.000 | 1.000 |",
    ]
    assert lines[-1] == (
        "3 of 4 rows at or above 1, geometric mean 1.133, the lowest 0.800; repeatable gradients "
        "0.894 of the default's speed."
    )


def test_without_repeatable_gradients_nothing_is_said_of_them(tmp_path: Path) -> None:
    text = lead_table(saved(tmp_path / "grid.json", [row(WINDOW, "attention", 2.0), row(WINDOW, "fa3", 3.0)]))
    assert "repeatable" not in text
    assert text.endswith("1 of 1 rows at or above 1, geometric mean 1.500, the lowest 1.500.")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultFileError, match="its benchmark is 'features'"):
        lead_table(saved(tmp_path / "features.json", [row(WINDOW, "attention", 2.0)], "features"))
    with pytest.raises(ResultFileError, match="no row of this library and a peer"):
        lead_table(saved(tmp_path / "alone.json", [row(WINDOW, "attention", 2.0)]))


def test_a_page_needs_the_file(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- results: lead -->\n<!-- end results -->\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"a table of lead needs its file: <!-- results: lead of FILE.json -->"
    ):
        update_readme(page, None, [])  # type: ignore[arg-type]  # refused before the report is looked at
