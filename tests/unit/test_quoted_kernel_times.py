"""Times of kernels before and after a change, in docs/ and CHANGELOG.md: each follows from a result file."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.explain.measured_cells import RESULTS

ROOT = Path(__file__).parents[2]
PAGES, INVARIANT = "h200-pages-lookup.json", "h200-invariant-shared.json"
APART = "h200-invariant-apart.json"
PROMOTION, DECODING = "h200-l2-promotion.json", "h200-decode-promotion.json"
ONCE, BOXES = "h200-decode-keys-once.json", "h200-decode-boxes.json"
FAMILIES = "h200-decode-families.json"
QUERIES = {  # line of the table in docs/kernels/hopper.md: the feature without keys of a page
    "a chunk of 2048, 128": "chunk 2048, 8k",
    "a chunk of 512, 128": "chunk 512, 8k",
    "a chunk of 2048 beside 63 sequences that decode, 128": "chunk 2048 + 63 decoding, 8k",
    "a chunk of 2048, 64": "chunk 2048, 8k, d 64",
    "a chunk of 2048, 256": "chunk 2048, 8k, d 256",
    "64 sequences that decode, 128": "64 decoding, 8k, Hopper",
}
NOT_IN_THE_TABLE = {
    "causal prompt, not in pages",
    "64 decoding, 8k, default, pages 16",
    "64 decoding, 8k, invariant, pages 16",
    "chunk 2048, 8k, invariant, pages 16",
    "chunk 2048, 8k, Ampere family, pages 16",
}


def text_of(path: str) -> str:
    """A page with single spaces in place of line ends."""
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


def times(name: str) -> dict[str, dict[str, float]]:
    """Feature to variant to milliseconds."""
    found: dict[str, dict[str, float]] = {}
    for row in ResultFile.load(RESULTS / name).rows:
        (time,) = row["milliseconds"].values()
        found.setdefault(row["feature"], {})[row["variant"]] = time["median"]
    return found


def microseconds(feature: str, variant: str) -> str:
    return f"{1e3 * times(PAGES)[feature][variant]:.0f}"


def costs(*features: str) -> list[str]:
    """Percent that invariant calls take longer than the default."""
    found = times(INVARIANT)
    return [f"{100 * (found[one]['invariant'] / found[one]['default'] - 1):.1f}" for one in features]


# ---------------------------------------------------------------------- pages
def test_times_of_keys_in_pages_are_those_of_the_file() -> None:
    page = (ROOT / "docs/kernels/hopper.md").read_text(encoding="utf-8")
    names = "|".join(QUERIES)
    lines = re.findall(rf"^\| ({names}) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    said = {f"{QUERIES[name]}, pages {keys}": [before, now] for name, keys, before, now in lines}
    assert said == {
        feature: [microseconds(feature, variant) for variant in ("before", "now")]
        for feature in times(PAGES)
        if feature not in NOT_IN_THE_TABLE
    }


def test_times_of_the_ampere_family_beside_them_are_those_of_the_file() -> None:
    decoding = microseconds("64 decoding, 8k, default, pages 16", "now")
    chunk = microseconds("chunk 2048, 8k, Ampere family, pages 16", "now")
    said = f"decoded in {decoding} µs and was still faster; for the chunk of 2048 it took {chunk}."
    assert said in text_of("docs/kernels/hopper.md")


def test_kernels_without_pages_take_as_long_as_before() -> None:
    found = times(PAGES)["causal prompt, not in pages"]
    assert abs(found["now"] / found["before"] - 1) < 0.01


def test_times_in_the_changelog_are_those_of_the_file() -> None:
    chunks = [f"chunk 2048, 8k, pages {keys}" for keys in (16, 32, 64)]
    now, before = ([microseconds(one, variant) for one in chunks] for variant in ("now", "before"))
    mixed = [microseconds("chunk 2048 + 63 decoding, 8k, pages 16", variant) for variant in ("now", "before")]
    text = text_of("CHANGELOG.md")
    said = "takes {}, {} and {} µs instead of {}, {} and {}, and beside 63 sequences that decode {}"
    assert f"{said} instead of {{}} in pages of 16".format(*now, *before, *mixed) in text


# ---------------------------------------------------------------------- what tensor maps ask for
def promotions() -> dict[tuple[str, int, int], dict[str, float]]:
    """Feature, queries and head size to microseconds by the bytes that come to the L2 cache at a time."""
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in ResultFile.load(RESULTS / PROMOTION).rows:
        problem = row["problem"]
        cell = row["feature"], problem["seq_len_q"], problem.get("window", 0) or problem["d_head"]
        (time,) = row["milliseconds"].values()
        found.setdefault(cell, {}).setdefault(row["variant"], 1e3 * time["median"])
    return found


def test_what_narrower_promotion_gains_is_that_of_the_file() -> None:
    found, text = promotions(), text_of("docs/kernels/hopper.md")

    def said(*cell: Any) -> list[str]:
        return [f"{found[cell][promotion]:.1f}" for promotion in ("128 bytes", "256 bytes")]

    short = said("short sequences", 256, 128)
    assert "64 causal sequences of 256 take {} µs instead of {},".format(*short) in text
    assert "512 of 32 take {} instead of {},".format(*said("short sequences", 32, 128)) in text
    window = said("window", 8192, 128)
    assert "a window of 128 over 8192 tokens {} instead of {}.".format(*window) in text
    assert "64 causal sequences of 256 take {} µs instead of {}".format(*short) in text_of("CHANGELOG.md")


def test_no_row_takes_longer_with_narrower_promotion() -> None:
    rows = ResultFile.load(RESULTS / PROMOTION).rows
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    assert f"Of the {len(pairs)} rows of the grid" in text_of("docs/kernels/hopper.md")
    for before, now in pairs:
        assert (before["variant"], now["variant"]) == ("256 bytes", "128 bytes")
        assert before["problem"] == now["problem"]
        (was,), (time,) = before["milliseconds"].values(), now["milliseconds"].values()
        assert time["median"] < 1.01 * was["median"]


def test_what_it_does_to_gradients_is_that_of_the_file() -> None:
    rows = ResultFile.load(RESULTS / "h200-l2-promotion-backward.json").rows
    times = [next(iter(row["milliseconds"].values()))["median"] for row in rows]
    cells = [times[i : i + 4] for i in range(0, len(times), 4)]  # 256 bytes twice, 128 bytes twice
    changes = [100 * (min(cell[2:]) / min(cell[:2]) - 1) for cell in cells]
    again = [100 * (cell[i + 1] / cell[i] - 1) for cell in cells for i in (0, 2)]
    text = text_of("docs/kernels/hopper.md")
    mean = sum(changes) / len(changes)
    said = (
        f"{len(cells)} rows of gradients took {min(changes):.1f} to {max(changes):.1f} % longer, {mean:.1f} %"
    )
    assert f"{said} in the mean" in text
    assert f"the same kernels took {min(again):.1f} to {max(again):.1f} % longer from one process" in text


def test_what_decoding_gains_by_it_is_that_of_the_file() -> None:
    gains = [100 * (1 - ms["wgmma, 128 bytes"] / ms["wgmma, 256 bytes"]) for ms in times(DECODING).values()]
    assert len(gains) == 8
    said = f"takes {min(gains):.1f} to {max(gains):.1f} % less time"
    assert said in text_of("docs/kernels/hopper.md")
    assert said in text_of("CHANGELOG.md")


# ---------------------------------------------------------------------- keys that are read once
def changes(file: str, variant: str, before: str, features: str = "") -> list[float]:
    """Percent by which a variant's times differ from those of another, where both were measured."""
    return [
        100 * (ms[variant] / ms[before] - 1)
        for feature, ms in times(file).items()
        if variant in ms and before in ms and features in feature
    ]


def test_what_keys_that_leave_the_cache_first_gain_is_that_of_the_file() -> None:
    text = text_of("docs/kernels/hopper.md")
    every, in_turn = (
        [
            change
            for kernel in ("wgmma", "invariant")
            for change in changes(ONCE, f"{kernel}, keys once", kernel, features)
        ]
        for features in ("", " caches")
    )
    assert f"takes up to {-min(every):.1f} % less time with that, nowhere more." in text
    assert max(every) < 0.05
    assert f"in turn they are {-max(in_turn):.1f} to {-min(in_turn):.1f} %." in text
    said = f"takes {-max(in_turn):.1f} to {-min(in_turn):.1f} % less time with several caches in turn"
    assert said in text_of("CHANGELOG.md")


def test_what_other_changes_to_decoding_do_is_that_of_the_files() -> None:
    text = text_of("docs/kernels/hopper.md")

    def span(*names: str) -> str:
        found = changes(*names)
        return f"{min(found):.1f} to {max(found):.1f} %"

    whole, once = "boxes of a tile", "invariant, keys once"
    heads = span(ONCE, f"{once}, heads first", once)
    assert f"before the next part change times by {heads}." in text
    small, smaller = (span(BOXES, f"boxes of {rows} rows", whole) for rows in (32, 16))
    assert f"right after each other, {small}; copies of 16 keys {smaller};" in text
    stages = span(BOXES, "two stages, keys once", f"{whole}, keys once")
    assert f"two stages instead of three {stages};" in text
    assert f"neither first nor last {span(BOXES, f'{whole}, evicted as others', whole)}." in text


def test_what_decoding_gains_by_the_other_family_is_that_of_the_file() -> None:
    text = text_of("docs/kernels/hopper.md")
    one = {who: f"{1e3 * ms:.1f}" for who, ms in times(FAMILIES)["decoding 1 x 16384, 7 caches"].items()}
    said = f"takes {one['wgmma']} µs where that one takes {one['mma.sync']}, with seven caches"
    assert said in text_of("docs/measurements.md")

    def spans(features: str, sign: int) -> str:
        found = [sign * change for change in changes(FAMILIES, "wgmma", "mma.sync", features)]
        return f"{min(found):.1f} to {max(found):.1f} %"

    narrow = changes(FAMILIES, "wgmma", "mma.sync", "d 96")
    others = [change for change in changes(FAMILIES, "wgmma", "mma.sync") if change not in narrow]
    slower = sum(change > 2 for change in others)
    assert f"of {len(others)} calls of other head sizes" in text
    assert f"half take at least {-statistics.median(others):.1f} % less time" in text
    assert f"4 queries a sequence {spans('n_q 4', -1)}, sequences" in text
    assert (
        f"different lengths {spans('32 of 100', -1)}; one in {len(others) // slower} takes 2 % more" in text
    )
    assert (
        f"or worse, at most {max(others):.1f} %. At head size 96 calls take {spans('d 96', 1)} more." in text
    )


# ---------------------------------------------------------------------- numerics="invariant"
def test_costs_of_invariant_prompts_are_those_of_the_file() -> None:
    short, middle, middle_again, long, long_again = costs(
        "d 128 1024 causal",
        "d 128 4096 causal", "d 128 4096 causal, again",
        "d 128 16384 causal", "d 128 16384 causal, again",
    )  # fmt: skip
    text = text_of("docs/kernels/invariant.md")
    line = f"| {short} | {middle}, again {middle_again} | {long}, again {long_again} |"
    assert f"one Q slot from 8192 keys on {line}" in text
    narrow = costs(*(f"d 64 {n} causal" for n in (1024, 4096, 16384)))
    assert "where head size 64 took {}, {} and {} % longer.".format(*narrow) in text
    said = "took {} % longer than the default at 1024 keys, {} and {} % at 4096 and {} and {} % at 16384"
    assert said.format(short, middle_again, middle, long, long_again) in text_of("CHANGELOG.md")


def test_random_pairs_are_those_of_the_file() -> None:
    pairs = ResultFile.load(RESULTS / "h200-invariant.json").facts["pairs_of_calls"]
    assert pairs["differing"] == 0
    said = "Of {hopper:,} random pairs of calls of the Hopper family there, and of {ampere:,} of the Ampere"
    assert said.format(**pairs) in text_of("docs/kernels/invariant.md")
    said = "{hopper:,} of the Hopper family by 160 kernels, {ampere:,} of the Ampere family by 79,"
    assert f"{said.format(**pairs)} head sizes 64 and 128, 0 differ" in text_of("docs/contract.md")


def test_costs_beside_the_table_are_those_of_the_files() -> None:
    text = text_of("docs/kernels/invariant.md")
    one = times(ONCE)["decoding 1 x 4096, 40 caches"]
    default, pieces = (f"{1e3 * one[f'{kernel}, keys once']:.1f}" for kernel in ("wgmma", "invariant"))
    assert f"in CUDA graphs it takes {default} µs, and two chunks {pieces} (" in text


def test_costs_of_the_ampere_family_are_those_of_the_file() -> None:
    found = times("h200-invariant-ampere.json")

    def longer(over: str, d_head: int) -> list[str]:
        prompts = [found[f"prompt d {d_head} {n} causal"] for n in (1024, 4096, 16384)]
        return [f"{100 * (ms['invariant of an A100'] / ms[over] - 1):.1f}" for ms in prompts]

    choosing = (ROOT / "docs/choosing.md").read_text(encoding="utf-8")
    for d_head in (128, 64):
        costs = " | ".join(longer("default of an A100", d_head))
        assert f"| head size {d_head}, % | {costs} |" in choosing
    for line, sizes in (
        ("one sequence of 16,384 keys", "1 x 16384"),
        ("8 sequences of 8192 keys", "8 x 8192"),
        ("64 sequences of 2048 keys", "64 x 2048"),
    ):
        calls = [found[f"decoding d {d_head} {sizes}"] for d_head in (128, 64)]
        wide, narrow = (f"{100 * (ms['invariant'] / ms['default'] - 1):.1f}" for ms in calls)
        assert re.search(rf"\| {line} \| {wide} \| \d+ \| {narrow} \| \d+ \|", choosing), line
    text = text_of("docs/kernels/invariant.md")
    chunks = [longer("invariant of an A100, without chunks", d_head) for d_head in (128, 64)]
    assert "are {}, {} and {} % at 1024, 4096 and 16,384 keys of head size 128".format(*chunks[0]) in text
    assert "and {}, {} and {} % at 64.".format(*chunks[1]) in text
    one, few, many = (
        [f"{1e3 * found[f'decoding d 128 {of}'][way]:.1f}" for way in ("invariant", "default")]
        for of in ("1 x 16384", "8 x 8192", "64 x 2048")
    )
    assert "in {} µs instead of {},".format(*one) in text
    assert "8 of 8192 in {} instead of {}, 64 of 2048 in {} instead of {}.".format(*few, *many) in text


def apart(feature: str, version: str) -> str:
    """Percent that an invariant call takes longer than the default, by the kernels of now or before."""
    found = times(APART)[feature]
    return f"{100 * (found[f'invariant, {version}'] / found[f'default, {version}'] - 1):.1f}"


def test_costs_of_kernels_with_pieces_apart_are_those_of_the_file() -> None:
    page = (ROOT / "docs/kernels/invariant.md").read_text(encoding="utf-8")
    keys = (1024, 2048, 4096, 8192, 16384)
    for line, feature in (
        ("head size 64, causal, %", "d 64 {} causal"),
        ("head size 128, causal, %", "d 128 {} causal"),
        ("head size 128, no mask, %", "d 128 {}"),
    ):
        now, before = (
            " | ".join(apart(feature.format(n), version) for n in keys) for version in ("now", "before")
        )
        assert f"| {line} | {now} |\n| the kernels before | {before} |" in page
    decoding = [float(apart(one, "now")) for one in times(APART) if "d 64 decoding" in one]
    said = f"Decoding of head size 64 took {min(decoding):.1f} to {max(decoding):.1f} % longer there."
    assert said in text_of("docs/kernels/invariant.md")


def test_gains_of_pieces_apart_in_the_changelog_are_those_of_the_file() -> None:
    now, before = (
        sorted(float(apart(f"d 64 {n} causal", version)) for n in (1024, 2048, 4096, 8192, 16384))
        for version in ("now", "before")
    )
    said = f"take {now[0]:.1f} to {now[-1]:.1f} % longer than the default"
    assert f"{said} instead of {before[0]:.1f} to {before[-1]:.1f}" in text_of("CHANGELOG.md")
