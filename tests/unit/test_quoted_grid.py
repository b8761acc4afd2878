"""Figures of mixed batches, and rows of the grid that are behind, in docs/measurements.md: all from files."""

from __future__ import annotations

import re
from collections import Counter

from test_quoted_kernel_times import ROOT, text_of, times

from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.explain.measured_cells import RESULTS


# ---------------------------------------------------------------------- mixed batches
def test_times_of_mixed_batches_are_those_of_the_file() -> None:
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in ResultFile.load(RESULTS / "h200-mixed-batch.json").rows:
        cell = found.setdefault((row["feature"], row["problem"]["page_size"]), {})
        cell[row["variant"]] = row["milliseconds"]["hot"]["median"]

    def ratio(batch: str, page: int = 64) -> str:
        return f"{found[batch, page]['one call'] / found[batch, page]['separate calls']:.2f}"

    page = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    for size in (64, 16):
        cells = [ratio(f"chunk 2048 + 63 decoding, {keys}", size) for keys in ("2k", "2k to 8k", "8k")]
        assert f"| pages of {size} | {' | '.join(cells)} |" in page
    text = text_of("docs/measurements.md")
    parts = [ratio(one) for one in ("chunk 512 + 63 decoding, 8k", "64 with 3 drafts, 8k", "chunk 2048, 8k")]
    assert (
        "beside them takes {}, 64 sequences with three drafts each {}, a chunk alone {}.".format(*parts)
        in text
    )
    parts = [ratio(one) for one in ("64 decoding, 2k to 8k", "64 decoding, 8k", "8 decoding, 16k")]
    assert "takes {} (64 sequences of 2k to 8k keys), {} (64 of 8k) and {} (8 of 16k)".format(*parts) in text
    alone = 1e3 * found["1 decoding, 16k", 64]["one call"]
    assert f"{ratio('1 decoding, 16k')} times as long, {alone:.1f} µs:" in text


PLANNED = {  # line of docs/measurements.md: the feature
    "one sequence that decodes, 1024": "1 decoding, 1k, 40 caches",
    "one sequence that decodes, 16,384": "1 decoding, 16k, 7 caches",
    "8 sequences that decode, 8192": "8 decoding, 8k",
    "64 sequences that decode, 2048": "64 decoding, 2k",
    "256 sequences that decode, 128": "256 decoding, 128, 4 caches",
    "a chunk of 512, 8192": "chunk 512, 8k, 2 caches",
    "a chunk of 2048, 8192": "chunk 2048, 8k",
    "a chunk of 2048 beside 63 sequences that decode, 8192": "chunk 2048 + 63 decoding, 8k",
    "the same, invariant": "chunk 2048 + 63 decoding, 8k, invariant",
    "16 prompts of 100 to 4000, not in pages": "16 prompts, 100 to 4000, not in pages",
}


def test_times_of_planned_launches_are_those_of_the_file() -> None:
    found = times("h200-planned-launches.json")
    page = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    for line, feature in PLANNED.items():
        before, now = (f"{1e3 * found[feature][when]:.1f}" for when in ("before", "now"))
        assert f"| {line} | {before} | {now} |" in page
    changes = [ms["now"] / ms["before"] for feature, ms in found.items() if "not planned" not in feature]
    least, most = (f"{100 * (1 - change):.1f}" for change in (max(changes), min(changes)))
    assert f"take {least} to {most} % less time" in text_of("CHANGELOG.md")


# ---------------------------------------------------------------------- rows of the grid that are behind
def leads(name: str) -> dict[str, float]:
    """The best peer's time over ours, by feature and sizes."""
    found: dict[str, dict[str, float]] = {}
    for row in ResultFile.load(RESULTS / name).rows:
        if row["milliseconds"]:
            (time,) = row["milliseconds"].values()
            found.setdefault(f"{row['feature']} {row['problem']}", {})[row["implementation"]] = time["median"]
    return {
        cell: min(ms for who, ms in times.items() if who != "attention") / times["attention"]
        for cell, times in found.items()
        if len(times) > 1
    }


def test_rows_that_are_behind_are_named() -> None:
    behind = {cell: ratio for cell, ratio in leads("h200-grid.json").items() if ratio < 1}
    assert {f"{ratio:.2f}" for ratio in behind.values()} == {"0.99"}
    assert Counter(cell.split(" {")[0] for cell in behind) == {
        "soft cap": 2, "short sequences": 2, "decode": 2,
    }  # fmt: skip
    rows = ResultFile.load(RESULTS / "h200-grid.json").rows
    short = [
        f"{1e3 * row['milliseconds']['hot']['median']:.1f}"
        for row in rows
        if row["implementation"] == "attention" and f"{row['feature']} {row['problem']}" in behind
        if row["feature"] == "short sequences"
    ]
    text = text_of("docs/measurements.md")
    assert "of which the kernels take {} and {}.".format(*short) in text
    assert "128 sequences of 128, 0.99 of cuDNN at both head sizes:" in text
    assert "A soft cap of 50 at head size 256, 0.99 of FlashAttention-3 with a causal mask and" in text
    table = text.partition("<!-- results: features of h200-grid.json -->")[2]
    few, many = (
        re.findall(rf"\| decode \| {sizes} h32/8 \| \S+ \| (\d+) % of a copy", table)[0]
        for sizes in ("b32 s1x2048", "b64 s1x4096")
    )
    said = f"keys come at {few} and {many} % of the rate of a copy"
    assert f"Decoding at 32 and 64 sequences, 0.99 of cuDNN: {said}" in text
