"""The ladders' tables in docs/kernels/ are those of the result file, and say what it says."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flash_helpers.benchmark.results import Results, Row
from flash_helpers.benchmark.timing import Timing
from flash_helpers.kernel_configs import DType, ForwardKernel, ForwardTraits
from flash_helpers.kernels.ampere.forward.choices import CHOICES
from flash_helpers.kernels.hopper.forward.resources import REGISTER_OVERHEAD, REGISTERS, WARPGROUP_ROWS
from flash_helpers.kernels.ladders import LADDERS, get_ladder
from flash_helpers.problem import Problem
from flash_helpers.report.data import Report, load_report
from flash_helpers.report.kernel_pages import (
    ATTENTION_FILES,
    FIGURES,
    MISSING,
    PAGES,
    RESULT_FILE,
    figure_name,
    filled,
    ladder_section,
    measured_ladders,
    write_attention_figures,
    write_figures,
)

KNOWN = [(family, d_head) for family, d_heads in LADDERS.items() for d_head in d_heads]


def row(name: str, problem: Problem, tflops: float, kind: str = "kernel") -> Row:
    ms = problem.flop() / tflops / 1e9
    timing = Timing(ms, ms, ms, 11)
    return Row(name, kind, problem, timings={"hot": timing}, environment={"gpu": "NVIDIA H100 80GB HBM3"})


def measured(path: Path, without: str = "") -> Report:
    """Rates of 100, 110, 120, … for the steps of the Hopper ladder of head size 128."""
    rows = []
    for causal in (False, True):
        problem = Problem(DType.BF16, 4, 16, 4096, 128, causal)
        for number, rung in enumerate(get_ladder("hopper", DType.BF16, 128, causal)):
            if rung.step.idea != without:
                name = ForwardKernel(rung.config, ForwardTraits(causal=causal)).short_form()
                rows.append(row(name, problem, 100 + 10 * number))
        rows.append(row("fa2", problem, 333, "peer"))
    Results(rows).save(path)
    return load_report([path])


def cells(table: str, idea: str) -> list[str]:
    (line,) = (line for line in table.splitlines() if f"| {idea} |" in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.name)
def test_pages_agree_with_the_result_file(page: Path) -> None:
    """After a new measurement or a new step: python -m flash_helpers.report.kernel_pages."""
    text = page.read_text(encoding="utf-8")
    assert filled(text, measured_ladders()) == text


def test_every_ladder_has_its_table() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))
    found = re.findall(r"<!-- ladder: (\w+) (\d+) -->", text)
    assert sorted((family, int(d_head)) for family, d_head in found) == sorted(KNOWN)


def test_registers_and_choices_are_those_of_the_code() -> None:
    hopper, ampere = ((PAGES / f"{name}.md").read_text(encoding="utf-8") for name in ("hopper", "ampere"))
    rows = re.findall(r"^\| (\d) \| (\d+) \| (\d+) / (\d+) \| (\d+) \|$", hopper, re.MULTILINE)
    assert [tuple(map(int, row)) for row in rows] == [
        (n, n * WARPGROUP_ROWS, *REGISTERS[n], REGISTERS[n][1] - REGISTER_OVERHEAD[n]) for n in REGISTERS
    ]
    rows = dict(re.findall(r"^\| (H100|A100|RTX 3090, 4090) \|(.+)\|$", ampere, re.MULTILINE))
    for gpu, capability in (("H100", (9, 0)), ("A100", (8, 0)), ("RTX 3090, 4090", (8, 9))):
        for d_head, cell in zip((128, 256), rows[gpu].split("|")[1:], strict=True):
            configs = {c.config for c in CHOICES if (c.capability, c.d_head) == (capability, d_head)}
            tiles = {f"{config.B_r} x {config.B_c}" for config in configs}
            assert set(re.findall(r"\d+ x \d+", cell)) == tiles
            assert set(re.findall(r"(\d) stage", cell)) == {str(config.kv_stages) for config in configs}
            assert ("pairs" in cell) == any(config.paired_warps for config in configs)


def test_cells_are_rates_and_gains(tmp_path: Path) -> None:
    table = ladder_section("hopper", 128, measured(tmp_path / "r.json"))
    assert cells(table, "step")[2:4] == ["4096", "4096, causal"]
    assert cells(table, "specialised warpgroups")[:4] == ["1", "specialised warpgroups", "100", "100"]
    assert cells(table, "ping-pong")[2:4] == ["110 (+10 %)"] * 2
    assert cells(table, "items from a counter")[2:4] == ["–", "190 (+6 %)"]
    assert cells(table, "two blocks share K and V")[2:4] == ["190 (+6 %)", "–"]
    assert cells(table, "fa2")[2:4] == ["333", "333"]
    assert "NVIDIA H100" in table


def test_a_step_that_was_not_measured_says_so(tmp_path: Path) -> None:
    table = ladder_section("hopper", 128, measured(tmp_path / "r.json", without="ping-pong"))
    assert cells(table, "ping-pong")[2:4] == [MISSING] * 2
    assert cells(table, "two products at a time")[2:4] == ["120 (+20 %)"] * 2


def test_without_measurements_there_are_reasons_and_the_command() -> None:
    table = ladder_section("ampere", 64, None)
    assert cells(table, "base")[2].startswith("the start")
    assert "flash-attention ladder --family ampere --d-head 64" in table


def test_a_marker_that_names_no_ladder_is_refused() -> None:
    with pytest.raises(ValueError, match="no ladder 'hopper 80'"):
        filled("<!-- ladder: hopper 80 -->\n<!-- end ladder -->", {})


def test_figures_show_every_step(tmp_path: Path) -> None:
    written = write_figures(measured(tmp_path / "r.json"), tmp_path)
    assert [path.name for path in written] == [figure_name("hopper", 128, causal) for causal in (False, True)]
    text = "".join(ElementTree.parse(written[0]).getroot().itertext())
    for rung in get_ladder("hopper", DType.BF16, 128, False):
        assert rung.step.idea in text
    assert "190  (+10, ×1.06)" in text


@pytest.mark.skipif(not RESULT_FILE.exists(), reason="the ladders were not measured yet")
def test_kept_figures_are_those_of_the_result_file(tmp_path: Path) -> None:
    for made in write_figures(load_report([RESULT_FILE]), tmp_path):
        kept = ElementTree.parse(FIGURES / made.name).getroot()
        assert list(kept.itertext()) == list(ElementTree.parse(made).getroot().itertext()), made.name


def test_attention_and_its_peers_are_drawn_for_each_card(tmp_path: Path) -> None:
    written = write_attention_figures(ATTENTION_FILES, tmp_path)
    assert [path.name for path in written] == ["attention-h100.svg", "attention-h200.svg"]
    for path in written:
        drawn = ElementTree.parse(path).getroot()
        assert "TFLOP/s over sequence length" in drawn.attrib["aria-label"]
        assert (FIGURES / path.name).exists()
    page = (PAGES.parent / "measurements.md").read_text(encoding="utf-8")
    assert all(f"(kernels/figures/{path.name})" in page for path in written)
