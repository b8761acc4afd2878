"""Ratios in docs/mods.md, docs/choosing.md and docs/kernels/ampere.md: each follows from a result file."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import geometric_mean

import pytest

from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.explain.measured_cells import RESULTS

DOCS = Path(__file__).parents[2] / "docs"
FILES = ("h200-mods.json", "h200-mods-backward.json")  # of each direction
SCORES = "h200-mods-scores-backward.json"
LATER = ("h200-mods-later.json", "h200-mods-later-backward.json")  # some functions with later kernels
BIAS = "h200-mods-bias.json"  # at lower clocks
GYM = "h200-attention-gym.json"
DOCUMENTS = ("h200-mods-documents.json", "h200-mods-documents-backward.json")
TABLE = {  # line of docs/mods.md: the feature, what its rate is a part of, tokens, files forward and backward
    "ALiBi, of the plain kernel's rate": ("alibi", "plain", 4096, *LATER),
    "T5's buckets, of the plain rate": ("buckets", "plain", 4096, *LATER),
    "dense bias, of the plain rate": ("bias", "plain", 4096, *LATER),
    "documents, of the rate of packed sequences": ("document", "twin", 4096, LATER[0], DOCUMENTS[1]),
    "the same, 1024 tokens": ("document", "twin", 1024, LATER[0], DOCUMENTS[1]),
    "the same, 16384 tokens": ("document", "twin", 16384, LATER[0], DOCUMENTS[1]),
    "documents that end at no multiple of 64": ("odd_document", "twin", 4096, LATER[0], DOCUMENTS[1]),
    "those, 1024 tokens": ("odd_document", "twin", 1024, LATER[0], DOCUMENTS[1]),
    "those, 16384 tokens": ("odd_document", "twin", 16384, LATER[0], DOCUMENTS[1]),
}
MORE, OF_AMPERE = "h200-mods-gallery.json", "h200-mods-ampere.json"
BESIDE_FLEX = {  # line of docs/mods.md: the feature, and the file
    "dilated windows": ("dilated", MORE),
    "neighbourhoods": ("neighbourhood", MORE),
    "block diffusion": ("block_diffusion", MORE),
    "tanh of the score": ("tanh", MORE),
    "documents, as packed sequences": ("document", MORE),
    "documents that end at no multiple of 64, likewise": ("odd_document", MORE),
    "Ampere family: noop": ("noop", OF_AMPERE),
    "Ampere family: causal": ("causal", OF_AMPERE),
    "Ampere family: window": ("window", OF_AMPERE),
    "Ampere family: document, by the kernel with the mask": ("document", OF_AMPERE),
    "Ampere family: prefix": ("prefix", OF_AMPERE),
    "Ampere family: ALiBi": ("alibi", OF_AMPERE),
    "Ampere family: soft cap": ("softcap", OF_AMPERE),
}
OPTIONS = ("noop", "causal", "window", "softcap")  # functions that become an option of the library
OTHER_RUN = "ran ALiBi at {} and {} of the plain rate, buckets at {} and {}, a dense bias at {} and {}"
AMPERE = "ALiBi forward at {} and {} of their plain rate, buckets at {} and {}, a dense bias at {} and {}"
COSTS = {  # line of docs/choosing.md: the features that it is about
    "prompts, head size 128": r"prompt d 128 .*",
    "causal prompts, head size 64": r"prompt d 64 .*",
    "decoding, in pages too": r"decoding (?!1 x 4096)(in pages )?\d+ x \d+",
    "packed queries that decode": r"decoding, packed queries \d+ x \d+",
    "a chunk of 2048 queries beside 63 sequences that decode": r"chunk of 2048 \+ 63 decoding, 8192",
    "decoding of one sequence of 4096 keys, which are two chunks": r"decoding 1 x 4096",
}


def table_lines(page: str) -> dict[str, list[str]]:
    """Cells of tables by their first one."""
    rows = re.findall(r"^\| (.+?) \|(.*)\|$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def medians(name: str) -> dict[tuple[str, str, int, int], float]:
    """Feature, variant, tokens and head size to milliseconds, of rows that have a time."""
    return {
        (row["feature"], row["variant"], row["problem"]["seq_len_k"], row["problem"]["d_head"]): row[
            "milliseconds"
        ]["hot"]["median"]
        for row in ResultFile.load(RESULTS / name).rows
        if row["milliseconds"]
    }


def beside(name: str, variant: str) -> dict[tuple[str, int, int], float]:
    """Feature, tokens and head size to the time of a variant over that of the function."""
    found = medians(name)
    return {
        (feature, tokens, d_head): found[feature, variant, tokens, d_head] / ms
        for (feature, of, tokens, d_head), ms in found.items()
        if of == "mod" and (feature, variant, tokens, d_head) in found
    }


def beside_flex() -> list[dict[tuple[str, int, int], float]]:
    """``flex_attention``'s time over the function's, forward and backward, the later where there are two."""
    found = []
    for name, later in zip(FILES, LATER, strict=True):
        first = beside(name, "flex")
        found.append(first | {cell: time for cell, time in beside(later, "flex").items() if cell in first})
    return found


def page_text(page: str) -> str:
    """A page with single spaces in place of line ends."""
    return " ".join((DOCS / page).read_text(encoding="utf-8").split())


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


def test_rates_beside_flex_attention_are_those_of_the_files() -> None:
    lines, by_file = table_lines("mods.md"), beside_flex()
    features = {feature for found in by_file for feature, *_ in found}
    assert len(features) > 8
    for feature in features:
        for cell, found in zip(lines[feature], by_file, strict=True):
            times = [time for (of, *_), time in found.items() if of == feature]
            wanted = dict.fromkeys(f"{time:.2f}" for time in (min(times), max(times)))
            assert re.findall(r"\d\.\d+", cell) == list(wanted), feature


@pytest.mark.parametrize("line", BESIDE_FLEX)
def test_more_rates_beside_flex_attention_are_those_of_the_files(line: str) -> None:
    feature, name = BESIDE_FLEX[line]
    (cell,) = table_lines("mods.md")[line]
    assert re.findall(r"\d\.\d+", cell) == ratios(name, feature, "flex", 4096)


def test_how_often_functions_are_faster_than_flex_attention_is_counted_in_the_files() -> None:
    text, by_file = page_text("mods.md"), beside_flex()
    timed = {sum(of == "mod" for _, of, *_ in medians(name)) for name in FILES}
    fast = [sum(time >= 1.5 for time in found.values()) for found in by_file]
    (n,) = timed
    said = f"the library is at least 1.5 times as fast in {fast[0]} forward and in {fast[1]} backward."
    assert f"Of {n} cells, {said}" in text
    assert [n - len(found) for found in by_file] == [1, 1]  # in which flex_attention does not compile
    assert min(time for found in by_file for time in found.values()) > 1
    slow = {cell for cell, time in by_file[1].items() if time < 1.5}
    assert slow == {
        *((feature, 1024, 128) for feature in ("noop", "causal", "window", "prefix", "alibi")),
        ("document", 4096, 128),
    }


def test_rates_in_the_script_of_attention_gym_are_those_of_the_file() -> None:
    rows, lines = ResultFile.load(RESULTS / GYM).rows, table_lines("mods.md")
    times = {
        (row["feature"], row["direction"], row["implementation"]): row["milliseconds"]["hot"]["median"]
        for row in rows
        if row["milliseconds"]
    }
    ours = {feature for feature, _, who in times if who == "attention"}
    assert len(ours) == 6
    for name in ours:
        said = [
            times[name, direction, "flex_attention"] / times[name, direction, "attention"]
            for direction in ("forward", "backward")
        ]
        assert f"attention-gym: {name}" in lines
        assert lines[f"attention-gym: {name}"] == [f"{ratio:.2f}" for ratio in said]


def test_what_becomes_an_option_runs_at_the_quoted_rates() -> None:
    ends = []
    for name in FILES:
        rates = [rate for (feature, *_), rate in beside(name, "twin").items() if feature in OPTIONS]
        assert len(rates) == 24
        ends += [f"{min(rates):.2f} to {max(rates):.2f}"]
    said = f"runs at {ends[0]} of the option's rate forward, and at {ends[1]} backward."
    assert said in page_text("mods.md")


def test_rates_of_kernels_with_the_mask_of_documents_are_those_of_the_files() -> None:
    ends = []
    for name in DOCUMENTS:
        found = medians(name)
        rates = [found[of, "twin", n, d] / ms for (of, who, n, d), ms in found.items() if who == "masked"]
        assert len(rates) == 12
        ends += [f"{min(rates):.2f} to {max(rates):.2f}"]
    assert f"at {ends[0]} of the packed rate forward, and at {ends[1]} backward" in page_text("mods.md")


def test_rates_of_a_bias_are_those_of_the_file() -> None:
    found = medians(BIAS)
    said = {
        (feature, variant): [
            f"{found[feature, 'plain', 4096, d] / found[feature, variant, 4096, d]:.2f}" for d in (128, 64)
        ]
        for feature in ("bias", "causal bias")
        for variant in ("rows", "mod")
    }
    text = page_text("mods.md")
    assert "a bias ran at {} and {} of its rate".format(*said["bias", "mod"]) in text
    times = {
        name: [
            f"{medians(name)['bias', variant, 4096, d]:.2f}"
            for variant in ("mod", "plain")
            for d in (128, 64)
        ]
        for name in (LATER[0], BIAS)
    }
    assert "A bias took {} and {} ms there, and the plain kernel {} and {}.".format(*times[LATER[0]]) in text
    assert "In another run the plain kernel took {} and {} ms".format(*times[BIAS][2:]) in text
    assert "read row by row, it ran at {} and {};".format(*said["bias", "rows"]) in text
    causal = said["causal bias", "mod"] + said["causal bias", "rows"]
    assert "under a causal mask it runs at {} and {}, by rows at {} and {}.".format(*causal) in text


def test_rates_of_the_kernels_before_are_those_of_the_file() -> None:
    rates = [rate for one in ("alibi", "buckets") for rate in ratios(FILES[0], one, "plain", 4096)]
    assert "the kernels before ran ALiBi at {} and {}, buckets at {} and {}".format(*rates) in page_text(
        "mods.md"
    )


def test_rates_of_another_run_are_those_of_the_file() -> None:
    rates = [r for one in ("alibi", "buckets", "bias") for r in ratios(SCORES, one, "plain", 4096)]
    assert f"the same kernels {OTHER_RUN.format(*rates)}" in page_text("mods.md")


def test_rates_of_the_ampere_family_are_those_of_the_file() -> None:
    features = ("alibi", "buckets", "bias")
    rates = [r for one in features for r in ratios("h200-mods-scores-ampere.json", one, "plain", 4096)]
    assert AMPERE.format(*rates) in page_text("mods.md")


# ---------------------------------------------------------------------- Ampere backward, costs of invariance
def test_rates_of_the_ampere_backward_pass_are_those_of_the_files() -> None:
    lines = table_lines("kernels/ampere.md")
    pairs = {
        "unordered sums over FlashAttention-2": ("unordered", "fa2"),
        "ordered sums over FlashAttention-2's deterministic mode": ("ordered", "fa2-deterministic"),
        "ordered sums over unordered ones": ("ordered", "unordered"),
    }
    wanted: dict[str, list[str]] = {line: [] for line in pairs}
    for dtype in ("bf16", "fp16"):
        times: dict[str, dict[tuple[int, bool, int], float]] = {}
        for row in ResultFile.load(RESULTS / f"h200-ampere-backward-cells-{dtype}.json").rows:
            name, problem = row["implementation"], row["problem"]
            if row["kind"] == "kernel":
                name = "ordered" if "+ordered" in name else "unordered"
            cell = (problem["d_head"], problem["causal"], problem["seq_len_q"])
            times.setdefault(name, {})[cell] = row["milliseconds"]["hot"]["median"]
        for line, (ours, other) in pairs.items():
            assert times[ours].keys() == times[other].keys()
            found = [times[other][cell] / ms for cell, ms in times[ours].items()]
            assert len(found) == 36
            wanted[line] += [f"{x:.3f}" for x in (geometric_mean(found), min(found), max(found))]
    assert {line: re.findall(r"\d\.\d+", " ".join(lines[line])) for line in pairs} == wanted


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
        list(dict.fromkeys(round(cost, 1) for cost in (min(costs), max(costs))))
    )


def test_every_measured_cost_is_in_a_line() -> None:
    features = {row["feature"] for row in ResultFile.load(RESULTS / "h200-invariant.json").rows}
    patterns = "|".join(f"(?:{pattern})" for pattern in COSTS.values())
    assert [feature for feature in features if not re.fullmatch(patterns, feature)] == []


def test_costs_of_kernels_that_were_tried_are_those_of_the_file() -> None:
    rows = ResultFile.load(RESULTS / "h200-invariant-trial.json").rows
    times = {(row["feature"], row["variant"]): row["milliseconds"]["hot"]["median"] for row in rows}

    def costs(variant: str) -> list[str]:
        prompts = [f"d 128 {n} causal" for n in (1024, 4096, 16384)]
        return [f"{100 * (times[one, variant] / times[one, 'default'] - 1):.1f}" for one in prompts]

    text = page_text("kernels/invariant.md")
    for line, variant in (
        ("its sums in global memory", "invariant"),
        ("whose bits are not equal", "without pieces"),
        ("as far as there is room", "pieces in shared memory"),
        ("may grow by 2^4 instead of 2^3", "pieces in shared memory, growth of 2^4"),
    ):
        assert f"{line} | {' | '.join(costs(variant))} |" in text
    gains = [
        ms / times[one, "two Q slots"]
        for (one, who), ms in times.items()
        if who == "invariant" and "decoding" in one and "decoding 1 " not in one
    ]
    assert len(gains) == 6
    assert (
        f"Two Q slots for decoding gained at most {100 * (max(gains) - 1):.1f} % from 8 sequences on" in text
    )
