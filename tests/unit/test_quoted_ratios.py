"""Ratios in tables of docs/mods.md and docs/choosing.md: each follows from a result file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.explain.measured_cells import RESULTS

DOCS = Path(__file__).parents[2] / "docs"
ANYWHERE = "h200-mods-documents-anywhere"
BACKWARD = "h200-mods-backward.json"
SCORES_BACKWARD = "h200-mods-scores-backward.json"
TABLE = {  # line of docs/mods.md: the feature, what its rate is a part of, tokens, files forward and backward
    "ALiBi, of the plain kernel's rate": ("alibi", "plain", 4096, "h200-mods-scores.json", SCORES_BACKWARD),
    "T5's buckets, of the plain rate": ("buckets", "plain", 4096, "h200-mods-scores.json", SCORES_BACKWARD),
    "dense bias, of the plain rate": ("bias", "plain", 4096, "h200-mods-scores.json", SCORES_BACKWARD),
    "documents, of the rate of packed sequences": (
        "document", "twin", 4096, "h200-mods-documents.json", BACKWARD,
    ),
    "the same, 1024 tokens": ("document", "twin", 1024, "h200-mods-documents.json", BACKWARD),
    "documents that end at no multiple of 64": (
        "document", "twin", 4096, f"{ANYWHERE}.json", f"{ANYWHERE}-backward.json",
    ),
    "those, 1024 tokens": ("document", "twin", 1024, f"{ANYWHERE}.json", f"{ANYWHERE}-backward.json"),
}  # fmt: skip
COSTS = {  # line of docs/choosing.md: the features that it is about
    "prompts, head size 128": r"prompt d 128 .*",
    "causal prompts, head size 64": r"prompt d 64 .*",
    "decoding, in pages too": r"decoding (?!1 x 4096)(in pages )?\d+ x \d+",
    "decoding of one sequence of 4096 keys, which are two pieces": r"decoding 1 x 4096",
    "decoding, packed queries": r"decoding, packed queries .*",
    "a chunk of 2048 queries beside 63 sequences that decode": r"chunk of .*",
}


def table_lines(page: str) -> dict[str, list[str]]:
    """Cells of tables by their first one."""
    rows = re.findall(r"^\| (.+?) \|(.*)\|$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def medians(name: str) -> dict[tuple[str, str, int, int], float]:
    """Feature, variant, tokens and head size to milliseconds."""
    return {
        (row["feature"], row["variant"], row["problem"]["seq_len_k"], row["problem"]["d_head"]): row[
            "milliseconds"
        ]["hot"]["median"]
        for row in ResultFile.load(RESULTS / name).rows
    }


def ratios(name: str, feature: str, beside: str, tokens: int) -> list[str]:
    """At head sizes 128 and 64, as far as they were measured."""
    found = medians(name)
    said = []
    for d_head in (128, 64):
        other = found.get((feature, beside, tokens, d_head), found.get((beside, beside, tokens, d_head)))
        if (feature, "mod", tokens, d_head) in found and other is not None:
            said.append(f"{other / found[feature, 'mod', tokens, d_head]:.2f}")
    return said


@pytest.mark.parametrize("line", TABLE)
def test_rates_of_functions_are_those_of_the_files(line: str) -> None:
    feature, beside, tokens, *files = TABLE[line]
    cells = table_lines("mods.md")[line]
    assert [re.findall(r"\d\.\d+", cell) for cell in cells] == [
        ratios(name, feature, beside, tokens) for name in files
    ]


@pytest.mark.parametrize("line", COSTS)
def test_costs_of_invariant_calls_are_those_of_the_file(line: str) -> None:
    times: dict[str, dict[str, float]] = {}
    for row in ResultFile.load(RESULTS / "h200-invariant.json").rows:
        times.setdefault(row["feature"], {})[row["variant"]] = row["milliseconds"]["hot"]["median"]
    costs = [
        100 * (found["invariant"] / found["default"] - 1)
        for feature, found in times.items()
        if re.fullmatch(COSTS[line], feature)
    ]
    assert costs
    (cell,) = table_lines("choosing.md")[line]
    assert [float(number) for number in re.findall(r"-?\d+\.\d", cell)] == pytest.approx(
        [round(cost, 1) for cost in dict.fromkeys((min(costs), max(costs)))]
    )


def test_every_measured_cost_is_in_a_line() -> None:
    features = {row["feature"] for row in ResultFile.load(RESULTS / "h200-invariant.json").rows}
    patterns = "|".join(f"(?:{pattern})" for pattern in COSTS.values())
    assert [feature for feature in features if not re.fullmatch(patterns, feature)] == []
