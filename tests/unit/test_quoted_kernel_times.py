"""Times of kernels before and after a change, in docs/ and CHANGELOG.md: each follows from a result file."""

from __future__ import annotations

import re
from pathlib import Path

from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.explain.measured_cells import RESULTS

ROOT = Path(__file__).parents[2]
PAGES, INVARIANT = "h200-pages-lookup.json", "h200-invariant-shared.json"
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
    said = f"decodes in {decoding} µs and is still faster; for the chunk of 2048 it takes {chunk}."
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


# ---------------------------------------------------------------------- numerics="invariant"
def test_costs_of_invariant_prompts_are_those_of_the_file() -> None:
    short, middle, middle_again, long, long_again = costs(
        "d 128 1024 causal",
        "d 128 4096 causal", "d 128 4096 causal, again",
        "d 128 16384 causal", "d 128 16384 causal, again",
    )  # fmt: skip
    text = text_of("docs/choosing.md")
    said = "take {} % longer at 1024 keys, {} and in a second turn {} % at 4096, {} and {} % at 16384"
    assert said.format(short, middle, middle_again, long, long_again) in text
    narrow = costs(*(f"d 64 {n} causal" for n in (1024, 4096, 16384)))
    assert "and those of head size 64 take {}, {} and {} %.".format(*narrow) in text
    said = "take {} % longer than the default at 1024 keys, {} and {} % at 4096 and {} and {} % at 16384"
    assert said.format(short, middle_again, middle, long, long_again) in text_of("CHANGELOG.md")


def test_random_pairs_are_those_of_the_file() -> None:
    facts = ResultFile.load(RESULTS / INVARIANT).facts
    assert facts["pairs_that_differ"] == 0
    assert f"of {facts['pairs']} by those with the changes" in text_of("docs/choosing.md")
    assert f"kernels since then {facts['pairs']}, 0 differ" in text_of("docs/contract.md")
