"""Figures that people wrote: each is in the result file that is named beside it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.benchmark.results import Row
from flash_helpers.explain.measured_cells import RESULTS
from flash_helpers.kernels.hopper.backward.choices import CHOICES, HopperBackwardChoice

DOCS = Path(__file__).parents[2] / "docs"
BACKWARD = "h200-hopper-backward-variants.json"
RATE = re.compile(r"\b\d{3}\b(?! rows)")
LENGTHS = {"512"}  # keys; other lengths have four digits and more
ROW = re.compile(r"\| (\d+) \| (none|causal) \| (\d+) \|(.*)\|")


@pytest.fixture(scope="module")
def measured() -> dict[tuple[int, bool, int], set[str]]:
    """Head size, causal mask and keys to the rates in the file; a causal mask counts as half of the work."""
    found: dict[tuple[int, bool, int], set[str]] = {}
    for row in map(Row.from_json, ResultFile.load(RESULTS / BACKWARD).rows):
        cell = (row.problem.d_head, row.problem.causal, row.problem.seq_len)
        if row.timings:
            flop = replace(row.problem, causal=False).flop() / (2 if row.problem.causal else 1)
            found.setdefault(cell, set()).add(f"{flop / row.timings['hot'].median / 1e9:.0f}")
    return found


def test_the_reasons_name_the_file() -> None:
    assert BACKWARD in (HopperBackwardChoice.__doc__ or "")


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: f"{choice.d_head}, {choice.reason[:24]}")
def test_reasons_of_backward_choices_quote_measured_rates(
    choice: HopperBackwardChoice, measured: dict[tuple[int, bool, int], set[str]]
) -> None:
    masks = {choice.masked} if choice.masked is not None else {False, True}
    known = {rate for (d, causal, _), rates in measured.items() if d == choice.d_head and causal in masks
             for rate in rates}  # fmt: skip
    quoted = set(RATE.findall(choice.reason)) - LENGTHS
    assert quoted <= known, f"no rate of head size {choice.d_head} in {BACKWARD}: {sorted(quoted - known)}"


def test_rates_on_the_page_are_those_of_the_file(measured: dict[tuple[int, bool, int], set[str]]) -> None:
    page = (DOCS / "kernels" / "hopper-backward.md").read_text(encoding="utf-8")
    rows = ROW.findall(page)
    assert BACKWARD in page
    assert len(rows) > 10
    for d_head, mask, seq_len, cells in rows:
        cell = (int(d_head), mask == "causal", int(seq_len))
        quoted = set(RATE.findall(cells))
        assert quoted, cell
        assert quoted <= measured[cell], (cell, sorted(quoted - measured[cell]))
