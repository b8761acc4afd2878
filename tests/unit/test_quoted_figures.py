"""Figures that people wrote: each is in the result file that is named beside it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.benchmark.results import Row
from flash_helpers.explain.measured_cells import RESULTS
from flash_helpers.kernels.hopper.backward.choices import CHOICES, HopperBackwardChoice

DOCS = Path(__file__).parents[2] / "docs"
BACKWARD = "h200-hopper-backward-variants.json"
TRAINING = "h200-training.json"
CALL_TIME = "h200-call-time.json"
LOSSES_OF_RANKS = "h200x2-context-parallel-losses.json"
NARROWER = "h200-hopper-backward-96.json"
RATE = re.compile(r"\b\d{3}\b(?! rows)")
LENGTHS = {"512"}  # keys; other lengths have four digits and more
ROW = re.compile(r"\| (\d+) \| (none|causal) \| (\d+) \|(.*)\|")
RANKS = "h200x2-context-parallel.json"
PEERS = "h200x2-context-parallel-peers.json"
OF_RANKS = re.compile(r"^\| (\d+) \| (none|\d+) \| (forward[^|]*|[\d.]+) \|(.*)\|$", re.MULTILINE)
OF_PEERS = re.compile(
    r"^\| (one GPU|this library[^|]*|ring-flash-[^|]*|PyTorch [^|]*) \|(.*)\|$", re.MULTILINE
)


@pytest.fixture(scope="module")
def measured() -> dict[tuple[int, bool, int], set[str]]:
    """Head size, causal mask and keys to the rates in the files; a causal mask counts as half of the work."""
    found: dict[tuple[int, bool, int], set[str]] = {}
    rows = [row for name in (BACKWARD, NARROWER) for row in ResultFile.load(RESULTS / name).rows]
    for row in map(Row.from_json, rows):
        cell = (row.problem.d_head, row.problem.causal, row.problem.seq_len)
        if row.timings:
            flop = replace(row.problem, causal=False).flop() / (2 if row.problem.causal else 1)
            found.setdefault(cell, set()).add(f"{flop / row.timings['hot'].median / 1e9:.0f}")
    return found


def test_the_reasons_name_the_file() -> None:
    assert all(name in (HopperBackwardChoice.__doc__ or "") for name in (BACKWARD, NARROWER))


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: f"{choice.d_head}, {choice.reason[:24]}")
def test_reasons_of_backward_choices_quote_measured_rates(
    choice: HopperBackwardChoice, measured: dict[tuple[int, bool, int], set[str]]
) -> None:
    masks = {choice.masked} if choice.masked is not None else {False, True}
    known = {rate for (d, causal, _), rates in measured.items() if d == choice.d_head and causal in masks
             for rate in rates}  # fmt: skip
    quoted = set(RATE.findall(choice.reason)) - LENGTHS
    assert quoted <= known, f"no rate of head size {choice.d_head} in {BACKWARD}: {sorted(quoted - known)}"


OF_96 = re.compile(r"^\| (none|causal) \| (\d+) \|((?: \d{3} \|){5})$", re.MULTILINE)


def test_rates_of_head_size_96_on_the_page_are_those_of_its_file(
    measured: dict[tuple[int, bool, int], set[str]],
) -> None:
    rows = OF_96.findall((DOCS / "kernels" / "hopper-backward.md").read_text(encoding="utf-8"))
    assert len(rows) == 6
    for mask, seq_len, cells in rows:
        assert set(RATE.findall(cells)) <= measured[96, mask == "causal", int(seq_len)], (mask, seq_len)


def test_rates_on_the_page_are_those_of_the_file(measured: dict[tuple[int, bool, int], set[str]]) -> None:
    page = (DOCS / "kernels" / "hopper-backward.md").read_text(encoding="utf-8")
    rows = ROW.findall(page)
    assert all(name in page for name in (BACKWARD, NARROWER))
    assert len(rows) > 10
    for d_head, mask, seq_len, cells in rows:
        cell = (int(d_head), mask == "causal", int(seq_len))
        quoted = set(RATE.findall(cells))
        assert quoted, cell
        assert quoted <= measured[cell], (cell, sorted(quoted - measured[cell]))


# ---------------------------------------------------------------------- training
def test_losses_on_the_page_are_those_of_the_file() -> None:
    page, facts = (
        (DOCS / "training.md").read_text(encoding="utf-8"),
        ResultFile.load(RESULTS / TRAINING).facts,
    )
    assert TRAINING in page
    for task in ("gpt", "encoder"):
        found, losses = facts[task], facts[task]["losses"]
        (row,) = re.findall(rf"^\| {task} \|(.*)\|$", page, re.MULTILINE)
        first = mean(curve[0] for curve in losses["eager"])
        last = [mean(curve[-1] for curve in losses[name]) for name in ("eager", "pytorch", "attention")]
        apart = [found["spread_of_eager"], *found["distance_from_eager"].values()]
        assert list(found["distance_from_eager"]) == ["pytorch", "attention"]
        repeats = "yes" if found["deterministic_runs_are_equal"] else "no"
        wanted = [f"{first:.2f}", *(f"{x:.3f}" for x in last), *(f"{x:.4f}" for x in apart), repeats]
        assert cells(row) == wanted


# ---------------------------------------------------------------------- the host's part of a call
def test_host_times_on_the_page_are_those_of_the_file() -> None:
    page = (DOCS / "measurements.md").read_text(encoding="utf-8")
    assert CALL_TIME in page
    found: dict[str, dict[str, float]] = {}
    for row in ResultFile.load(RESULTS / CALL_TIME).rows:
        if row["milliseconds"]:
            times = found.setdefault(row["feature"], {})
            times[row["implementation"]] = 1e3 * row["milliseconds"]["host"]["median"]
    calls = {
        "dense": "128 tokens",
        "decode": "one query over 4096 keys, 32 heads over 8",
        "gradients": "128 tokens, with gradients, both passes",
    }
    for feature, label in calls.items():
        (quoted,) = re.findall(rf"^\| {label} \|(.*)\|$", page, re.MULTILINE)
        times = found[feature]
        wanted = [f"{times[name]:.1f}" for name in ("attention", "fa2", "cudnn")]
        assert cells(quoted) == [*wanted, f"{times['attention'] / times['fa2']:.2f}"]


def test_losses_of_ranks_are_those_of_the_file() -> None:
    page = (DOCS / "context-parallel.md").read_text(encoding="utf-8")
    facts = ResultFile.load(RESULTS / LOSSES_OF_RANKS).facts
    one, *others = facts["losses"].values()
    apart = [max(abs(a - b) for a, b in zip(one, x, strict=True)) for x in others]
    assert list(facts["apart"].values()) == pytest.approx(apart, abs=1e-6)
    assert max(apart) < 1e-3
    (quoted,) = re.findall(
        rf"`benchmarks/results/{LOSSES_OF_RANKS}`\) are (\S+) at first and (\S+) at step (\d+)\n"
        r".* at most (\S+) with two;",
        page,
    )
    assert quoted == (f"{one[0]:.4f}", f"{one[-1]:.4f}", str(len(one)), f"{max(apart):.4f}")


# ---------------------------------------------------------------------- ranks
Cell = tuple[str, int, int | None, str]  # implementation, tokens, window, pass


def of_ranks(name: str) -> dict[Cell, dict[str, float]]:
    """What a file of ranks holds of each cell, with its time as ``ms``."""
    file = ResultFile.load(RESULTS / name)
    found: dict[Cell, dict[str, float]] = {}
    for row, facts in zip(file.rows, file.facts["rows"], strict=True):
        cell = (facts["implementation"], facts["tokens"], facts["window"], facts["variant"])
        assert cell[0::3] == (row["implementation"], row["variant"])
        found[cell] = {**facts, "ms": row["milliseconds"]["hot"]["median"]}
    return found


def cells(text: str) -> list[str]:
    return [cell.strip() for cell in text.split("|")]


def timed(row: dict[str, float]) -> str:
    return f"{row['ms']:.2f}" + (f" ({row['efficiency']:.2f})" if "efficiency" in row else "")


def test_times_of_ranks_on_the_page_are_those_of_the_file() -> None:
    page, file = (DOCS / "context-parallel.md").read_text(encoding="utf-8"), of_ranks(RANKS)
    methods = [f"zigzag {method}" for method in ("all_gather", "ring", "ulysses")]
    kinds = {"times": 0, "bytes": 0, "reserved": 0}
    assert RANKS in page
    for tokens, window, which, rest in OF_RANKS.findall(page):
        place = (int(tokens), None if window == "none" else int(window))
        if not which.startswith("forward"):
            kinds["reserved"] += 1
            names = ["zigzag ring" + ("" if n == 8 else f", {n} SMs reserved") for n in (0, 4, 8, 16)]
            wanted = [f"{file[(name, *place, 'forward')]['ms']:.2f}" for name in names]
            assert [which, *cells(rest)] == wanted, place
        elif "MB" in rest:
            kinds["bytes"] += 1
            rows = [file[(name, *place, which)] for name in methods]
            assert cells(rest) == [f"{r['megabytes_sent']:.0f} MB, {r['exposed_ms']:.2f} ms" for r in rows]
        else:
            kinds["times"] += 1
            assert cells(rest) == [timed(file[(name, *place, which)]) for name in ("one GPU", *methods)]
    assert kinds == {"times": 12, "bytes": 8, "reserved": 4}


def test_times_of_peers_on_the_page_are_those_of_the_file() -> None:
    page, file = (DOCS / "context-parallel.md").read_text(encoding="utf-8"), of_ranks(PEERS)
    passes = ("forward", "forward and backward")
    assert PEERS in page
    found = [(name.replace("this library,", "zigzag"), rest) for name, rest in OF_PEERS.findall(page)]
    assert {name for name, _ in found} == {cell[0] for cell in file}
    for name, rest in found:
        rows = [file[name, tokens, None, which] for tokens in (65536, 16384) for which in passes]
        assert cells(rest) == [timed(row) for row in rows], name
