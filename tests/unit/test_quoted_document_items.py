"""Times of large items with documents in docs/mods.md and the bound they follow: all from result files."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash_attention.run.document_calls import FLOP_PER_SM, LAUNCHES_BEFORE
from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.explain.measured_cells import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "mods.md"
FILES = ("h200-mods-document-items.json", "h200-mods-document-items-backward.json")
Cell = tuple[int, int, int]


def times(name: str) -> dict[Cell, dict[str, float]]:
    """Items, tokens and head size to the milliseconds of both ways."""
    found: dict[Cell, dict[str, float]] = {}
    for row in ResultFile.load(RESULTS / name).rows:
        cell = tuple(row["problem"][size] for size in ("batch", "seq_len_k", "d_head"))
        found.setdefault(cell, {})[row["variant"]] = row["milliseconds"]["hot"]["median"]
    return found


def test_times_of_large_items_are_those_of_the_files() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    forward, backward = map(times, FILES)
    long = 16, 32768, 64
    assert "take {items:.1f} ms instead of {mask:.1f}".format(**forward[long]) in text
    assert "their gradients {items:.1f} instead of {mask:.1f} (".format(**backward[long]) in text
    assert "would take {items:.2f} instead of {mask:.2f} ms".format(**forward[8, 8192, 64]) in text
    assert "at head size 128 {items:.2f} instead of {mask:.2f},".format(**forward[8, 8192, 128]) in text


def test_the_host_takes_what_the_page_says() -> None:
    forward = times(FILES[0])
    few, more = (forward[items, 8192, 64]["items"] for items in (2, 8))  # shorter than the host's calls
    of_each = (more - few) / 6
    assert of_each == pytest.approx(0.063, abs=5e-4)
    assert few - 2 * of_each == pytest.approx(0.39, abs=5e-3)
    assert pytest.approx(few / of_each - 2, abs=0.3) == LAUNCHES_BEFORE


def test_the_bound_chooses_the_faster_way() -> None:
    documents = {(16, 32768): 2731, (2, 8192): 1000, (8, 8192): 1000, (8, 4224): 1400}
    for (items, tokens, d_head), ms in times(FILES[0]).items():
        flop = 4 * 16 * d_head * tokens * documents[items, tokens]
        apart = items * flop >= (items + LAUNCHES_BEFORE) * FLOP_PER_SM * 132
        assert apart == (ms["items"] < ms["mask"])
