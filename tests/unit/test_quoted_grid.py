"""Figures of mixed batches, and rows of the grid that are behind, in docs/measurements.md: all from files."""

from __future__ import annotations

from test_quoted_kernel_times import DECODING, ONCE, ROOT, promotions, text_of, times

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
    assert sorted(f"{ratio:.2f}" for ratio in behind.values()) == ["0.97", "0.99", "0.99", "0.99"]
    assert {cell.split(" {")[0] for cell in behind} == {"soft cap", "short sequences"}
    rest = {cell: ratio for cell, ratio in leads("h200-grid-rest.json").items() if ratio < 1}
    assert sorted(f"{ratio:.2f}" for ratio in rest.values()) == ["0.98", "0.98"]
    assert {cell.split(" {")[0] for cell in rest} == {"decode"}
    text = text_of("docs/measurements.md")
    window = promotions()["window", 8192, 128]
    assert f"a window of 128 takes {window['128 bytes']:.1f} µs instead of {window['256 bytes']:.1f}" in text
    many, few = times(DECODING)["decoding 64 x 4096"], times(ONCE)["decoding 32 x 2048, 6 caches"]
    first, once = many["wgmma, 128 bytes, keys evicted first"], few["wgmma, keys once"]
    file = "`benchmarks/results/h200-decode-promotion.json`"
    gains = 100 * (1 - first / many["mma.sync"]), 100 * (1 - once / few["mma.sync"])
    assert f"take {gains[0]:.1f} % less at 64 sequences of 4096 ({file}) and {gains[1]:.1f} %" in text
