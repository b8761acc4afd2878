"""The report from result files: figures, page, README tables."""

from __future__ import annotations

import json
import re
import statistics
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from flash_helpers.benchmark.cases import Case
from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.benchmark.results import DifferentCardsError, ResultFileError, Results, Row
from flash_helpers.benchmark.table import results_table
from flash_helpers.benchmark.timing import Timing
from flash_helpers.kernel_configs import get_autotuning_kernel_configs, get_kernel_progression_configs
from flash_helpers.kernels.dtype import DType
from flash_helpers.problem import Problem
from flash_helpers.report import update_readme, write_report
from flash_helpers.report.command import report_command
from flash_helpers.report.data import OURS, load_report

ENVIRONMENT = {
    "gpu": "NVIDIA H100 80GB HBM3", "capability": "9.0", "driver": "580.95", "cuda": "13.0",
    "torch": "2.11.0+cu130", "cudnn": 91900, "git_commit": "0123456789ab",
}  # fmt: skip
LADDER = (204.0, 262.0, 281.0, 290.0, 288.0, 331.0, 352.0)


def row(name: str, kind: str, problem: Problem, tflops: float) -> Row:
    """A row whose hot median gives ``tflops``."""
    ms = problem.flop() / tflops / 1e9
    return Row(
        name, kind, problem, error=2.2e-4, timings={"hot": Timing(ms, 0.99 * ms, 1.02 * ms, 11)},
        environment=ENVIRONMENT,
    )  # fmt: skip


def recorded_rows() -> list[Row]:
    """A run as a GPU machine records it: a grid with peers, the ladder, a tuning set, an absent peer."""
    rows = []
    for d_head in (64, 128):
        for causal in (False, True):
            for seq_len in (512, 1024, 2048, 4096, 8192, 16384):
                problem = Problem(DType.BF16, 16384 // seq_len, 2048 // d_head, seq_len, d_head, causal)
                full = (300 if d_head == 64 else 360) * (0.8 if causal else 1.0) * (1 - 100 / seq_len)
                rows.append(row("fa2", "peer", problem, full))
                rows.append(row("cudnn", "peer", problem, 1.4 * full))
                absent = Row("fa3", "peer", problem, "unavailable", "not installed (pip install fa3-fwd)")
                rows.append(replace(absent, environment=ENVIRONMENT))
                config = next(
                    c for c in get_autotuning_kernel_configs() if (c.dtype, c.d_head) == (15, d_head)
                )
                rows.append(row(config.short_form(), "kernel", problem, (1.2 + seq_len / 32768) * full))
    headline = Problem(DType.FP16, 16, 16, 4096, 128)
    for config, rate in zip(get_kernel_progression_configs(), LADDER, strict=True):
        rows.append(row(config.short_form(), "kernel", headline, rate))
    for number, config in enumerate(
        c for c in get_autotuning_kernel_configs([DType.FP16]) if c.d_head == 128
    ):
        rows.append(row(config.short_form(), "kernel", headline, 250.0 + 37 * number % 110))
    return rows


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "result.json"
    Results(recorded_rows(), {"BF16": 781.0, "FP16": 760.0}).save(path)
    return path


@pytest.fixture(scope="module")
def report_folder(recorded: Path) -> Path:
    write_report([recorded], recorded.parent / "report")
    return recorded.parent / "report"


def test_the_page_is_whole_and_needs_no_network(report_folder: Path) -> None:
    names = {path.name for path in report_folder.iterdir()}
    figures = ("tflops", "ratio", "ladder", "roofline", "landscape")
    assert names == {"index.html"} | {f"{f}.{end}" for f in figures for end in ("svg", "png")}
    page = (report_folder / "index.html").read_text()
    outside = [u for u in re.findall(r"https?://[^\s\"'<)]+", page) if "www.w3.org" not in u]
    assert outside == []
    assert not re.search(r"<(script|link|img|iframe)\b", page)
    assert page.count("<svg ") == 5
    assert "prefers-color-scheme: dark" in page
    assert "currentColor" in page
    assert "#123456" not in page  # no stand-in colour is left
    assert "not installed (pip install fa3-fwd)" in page
    assert "NVIDIA H100 80GB HBM3" in page


def test_rows_stand_by_size_the_fastest_first(recorded: Path, report_folder: Path) -> None:
    page = (report_folder / "index.html").read_text()
    table = page.split("<h2>All rows</h2>")[1].split("</table>")[0]
    cells = [re.findall(r"<td>(.*?)</td>", line) for line in re.findall(r"<tr[^>]*>(<td>.*?)</tr>", table)]
    rows = load_report([recorded]).rows_in_order()
    assert [(c[0], c[-1].replace("<wbr>", "")) for c in cells] == [
        (r.problem.label(), r.implementation) for r in rows
    ]
    same = [(a, b) for a, b in pairwise(rows) if a.problem == b.problem]
    assert all((a.tflops() or 0) >= (b.tflops() or 0) for a, b in same)
    assert len(rows) - len(same) == table.count('<tr class="fastest">') == len({r.problem for r in rows})
    lengths = [r.problem.seq_len for r in rows if (r.problem.dtype, r.problem.d_head) == (DType.BF16, 64)]
    assert lengths == sorted(lengths[: len(lengths) // 2]) * 2  # without and with the causal mask


def test_no_stand_in_colour_is_left_in_png(recorded: Path) -> None:
    from flash_helpers.report.figures import draw
    from flash_helpers.report.style import FAINT, INK, to_png

    figure = draw(load_report([recorded]))["tflops"]
    to_png(figure)
    marks = [tick.tick1line for axis in figure.axes for tick in axis.xaxis.get_major_ticks()]
    assert not {str(mark.get_markeredgecolor()) for mark in marks} & {INK, FAINT}


def test_ids_of_inlined_figures_do_not_collide_wrongly(report_folder: Path) -> None:
    """An id used twice in a page must mean the same drawing: a reference takes the first."""
    page = (report_folder / "index.html").read_text()
    meant: dict[str, str] = {}
    for svg in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        for element in ElementTree.fromstring(svg).iter():
            used = element.get("id")
            if used and f"#{used}" in svg:
                element.tail = None
                text = ElementTree.tostring(element, encoding="unicode")
                assert meant.setdefault(used, text) == text


def test_svg_files_are_valid_and_equal_runs_give_equal_files(
    recorded: Path, report_folder: Path, tmp_path: Path
) -> None:
    write_report([recorded], tmp_path)
    for path in report_folder.glob("*.svg"):
        ElementTree.parse(path)
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


def test_curves_take_the_best_kernel_of_each_size(recorded: Path) -> None:
    report = load_report([recorded])
    curves = report.curves(("FP16", 128, False))
    assert list(curves) == [OURS]
    best = max(r.tflops() or 0 for r in report.rows if r.problem.dtype == DType.FP16)
    assert curves[OURS] == {4096: best}


def test_ratios_are_to_the_fastest_peer(recorded: Path) -> None:
    ratios = load_report([recorded]).ratios()
    assert ("FP16", 128, False) not in ratios  # no peer was timed there
    assert ratios["BF16", 128, True][16384] == pytest.approx((1.2 + 0.5) / 1.4)


def test_a_length_with_several_problems_compares_within_one(tmp_path: Path) -> None:
    """Each implementation's best rate belongs to another problem: they are no pair."""
    large, small = Problem(DType.FP16, 8, 8, 1024, 64), Problem(DType.FP16, 1, 1, 1024, 64)
    name = get_autotuning_kernel_configs([DType.FP16])[0].short_form()
    rows = [row(name, "kernel", small, 300.0), row(name, "kernel", large, 200.0)]
    rows += [row("fa2", "peer", small, 150.0), row("fa2", "peer", large, 250.0)]
    path = tmp_path / "two.json"
    Results(rows).save(path)
    assert load_report([path]).ratios() == {("FP16", 64, False): {1024: pytest.approx(200 / 250)}}


def test_ladder_keeps_the_order_of_the_steps(recorded: Path) -> None:
    found = load_report([recorded]).ladder()
    assert found is not None
    names = [name for name, _ in found[1]]
    assert names == [c.short_form(include_tup=False) for c in get_kernel_progression_configs()]


def test_figures_without_data_are_left_out(tmp_path: Path) -> None:
    problem = Problem(DType.FP16, 1, 1, 512, 64)
    path = tmp_path / "one.json"
    Results([replace(row("fa2", "peer", problem, 100.0), environment={"gpu": "cpu"})]).save(path)
    names = {p.name for p in write_report([path], tmp_path / "out")}
    assert names == {"index.html", "tflops.svg", "tflops.png"}


def test_files_of_different_cards_or_without_times_are_refused(recorded: Path, tmp_path: Path) -> None:
    other = tmp_path / "a100.json"
    problem = Problem(DType.FP16, 1, 1, 512, 64)
    Results([replace(row("fa2", "peer", problem, 9.0), environment={"gpu": "NVIDIA A100"})]).save(other)
    with pytest.raises(DifferentCardsError, match="A100"):
        write_report([recorded, other], tmp_path / "out")
    with pytest.raises(ValueError, match=r"mode 'paused'; choose .* --mode: hot"):
        write_report([recorded], tmp_path / "out", mode="paused")
    with pytest.raises(ResultFileError, match=r"none\.json"):
        write_report([tmp_path / "none.json"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_of_other_schemas_are_skipped_by_name(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, later = tmp_path / "features.json", tmp_path / "later.json"
    other.write_text('{"rows": []}')
    later.write_text('{"schema": 3, "rows": []}')
    report_command([other, recorded, later], tmp_path / "out", json_path=tmp_path / "said.json")
    shown = capsys.readouterr().out
    page = (tmp_path / "out" / "index.html").read_text()
    skipped = json.loads((tmp_path / "said.json").read_text())["skipped"]
    for text in (shown, page.split("<h2>Files that are not shown</h2>")[1], *[" ".join(skipped)]):
        assert f"{other} is no result file; this version reads files of schema 2" in text
        assert f"{later} has schema 3" in text
    with pytest.raises(ResultFileError, match=r"none of the files can be shown: .*features.*later"):
        write_report([other, later], tmp_path / "out")
    other.write_text("{")
    with pytest.raises(ResultFileError, match="can't be read as a result file"):
        write_report([recorded, other], tmp_path / "out")


def test_kernels_of_other_versions_are_shown_where_their_names_need_not_be_read(tmp_path: Path) -> None:
    problem = Problem(DType.BF16, 1, 1, 512, 64)
    names = [c.short_form() for c in get_autotuning_kernel_configs([DType.BF16])[:2]]
    gone = "(BF16, 64, 256, 64, 4wg): tma+kv_6+q_2+overlap+forgotten_choice"
    path = tmp_path / "old.json"
    Results([row(name, "kernel", problem, 100.0) for name in (*names, gone)]).save(path)
    write_report([path], tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "forgotten_choice" in page.replace("<wbr>", "")
    landscape = load_report([path]).landscape()
    assert landscape is not None
    assert len(landscape[1]) == 2


def test_readme_tables_are_replaced_between_markers(recorded: Path, tmp_path: Path) -> None:
    report = load_report([recorded])
    readme = tmp_path / "README.md"
    readme.write_text(
        "before\n<!-- results: ratio -->\nold\n<!-- end results -->\nmiddle\n"
        "<!-- results: ladder -->\n<!-- end results -->\nafter\n"
    )
    assert update_readme(readme, report)
    text = readme.read_text()
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| best kernel / best peer | 512 | 1024 |" in text
    assert "| 7 | `async+eager+swizzled+load_0_2_2_tiles+opt_softmax` |" in text
    assert not update_readme(readme, report)  # a second run changes nothing


def test_a_table_of_a_named_file_is_filled_from_that_file_only(recorded: Path, tmp_path: Path) -> None:
    report = load_report([recorded])
    readme = tmp_path / "README.md"
    readme.write_text(
        "<!-- results: ratio of other.json -->\nkept\n<!-- end results -->\n"
        f"<!-- results: ratio of {recorded.name} -->\nold\n<!-- end results -->\n"
    )
    assert update_readme(readme, report, [recorded])
    text = readme.read_text()
    assert "kept" in text
    assert "old" not in text
    assert text.count("| best kernel / best peer |") == 1


@pytest.mark.parametrize("page", ["README.md", "docs/measurements.md"])
def test_each_table_of_a_named_file_holds_that_file_alone(page: str, tmp_path: Path) -> None:
    """After a new measurement: flash-attention report benchmarks/results/FILE.json … --readme PAGE."""
    root = Path(__file__).parents[2]
    copy = tmp_path / "page.md"
    copy.write_text((root / page).read_text())
    files = [
        root / "benchmarks" / "results" / name for name in re.findall(r" of ([\w.-]+json)", copy.read_text())
    ]
    assert len(files) > 1
    assert not update_readme(copy, load_report(files[:1]), files)


def test_the_summary_says_mean_and_lowest(recorded: Path, tmp_path: Path) -> None:
    report = load_report([recorded])
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results: summary -->\n<!-- end results -->\n")
    assert update_readme(readme, report)
    ratios = [ratio for row in report.ratios().values() for ratio in row.values()]
    text = readme.read_text()
    assert f"geometric mean {statistics.geometric_mean(ratios):.3f}" in text
    assert f"{sum(r >= 1 for r in ratios)} of {len(ratios)} cells" in text
    assert f"the lowest {min(ratios):.3f} (" in text


def test_a_table_of_features(recorded: Path, tmp_path: Path) -> None:
    decode = Case("decode", 1, 1, 1024, 32, 8)
    prompt = Case("causal", 1, 1024, 1024, 32, 32)

    def of(case: Case, name: str, **times: float) -> dict[str, object]:
        found = {mode: {"median": ms} for mode, ms in times.items()}
        kind = "kernel" if name == "attention" else "peer"
        return {"implementation": name, "kind": kind, "feature": case.feature, "problem": case.to_json(),
                "milliseconds": found}  # fmt: skip

    rows = [
        of(decode, "attention", cold=0.002), of(decode, "fa2", cold=0.003), of(prompt, "attention", hot=1.0),
        of(prompt, "fa2"), of(replace(prompt, causal=True), "attention"),
    ]  # fmt: skip
    facts = {"gpu": "Card", "driver": "1.2", "git_commit": "abc"}
    path = tmp_path / "features.json"
    ResultFile("features", "for a test", rows, facts, {"copy_bytes_per_second": 4e12}).save(path)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results: features of features.json -->\n<!-- end results -->\n")
    assert update_readme(readme, load_report([recorded]), [path])
    lines = readme.read_text().splitlines()
    # 4 MiB in 2 us are 2.10 TB/s; 4 * 32 * 128 * 1024^2 FLOP in 1 ms
    assert "| decode | b1 s1x1024 h32/8 | 2.0 | 52 % of a copy | 1.50 |" in lines
    assert "| causal | b1 s1024 h32 | 1000.0 | 17 TFLOP/s |  |" in lines
    assert "_Card; driver 1.2; commit abc; copy 4000 GB/s read and written_" in lines
    assert not any("b1 s1024 h32 causal" in line for line in lines)
    path.write_text("{}")
    with pytest.raises(ResultFileError, match=r"features\.json can't be read as a result file of .*features"):
        update_readme(readme, load_report([recorded]), [path])
    readme.write_text("<!-- results: features -->\n<!-- end results -->\n")
    with pytest.raises(ValueError, match="needs its file: <!-- results: features of FILE"):
        update_readme(readme, load_report([recorded]), [path])


def test_what_cannot_be_filled_is_found_out_before_figures_are_drawn(recorded: Path, tmp_path: Path) -> None:
    binary = tmp_path / "binary.md"
    binary.write_bytes(b"\xff\xfe")
    for readme in (tmp_path / "none.md", tmp_path, binary):
        with pytest.raises(ValueError, match=f"{readme} can't be read as a Markdown file"):
            report_command([recorded], tmp_path / "out", readme=readme)
    assert not (tmp_path / "out").exists()


def test_broken_screening_rows_are_named(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "milestone.json"
    document = Results(screening=recorded_rows()[:1], benchmark="milestone").file().document()
    path.write_text(json.dumps(document))
    assert len(load_report([path]).rows) == 1
    document["rows"][0]["milliseconds"] = 5
    path.write_text(json.dumps(document))
    with pytest.raises(
        ResultFileError, match=r"milestone\.json has schema 2 but a broken row .*; measure again"
    ):
        load_report([recorded, path])


def test_readme_mistakes_are_named(recorded: Path, tmp_path: Path) -> None:
    report = load_report([recorded])
    readme = tmp_path / "README.md"
    readme.write_text("nothing to fill")
    with pytest.raises(ValueError, match="has no '<!-- results"):
        update_readme(readme, report)
    readme.write_text("<!-- results: speed -->\n<!-- end results -->")
    with pytest.raises(ValueError, match="known: ratio, summary, tflops, ladder, features, lead"):
        update_readme(readme, report)


# ---------------------------------------------------------------- families, types and processors apart
def two_families(tmp_path: Path) -> Path:
    """fp16 rows of one family, bf16 rows of another, rows of the own choice; a peer in both."""
    ampere, hopper = (
        "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax",
        ("(BF16, 128, 128, 128, 2wg): tma+kv_2+q_1+exact"),
    )
    fp16, bf16 = (Problem(dtype, 4, 16, 4096, 128) for dtype in (DType.FP16, DType.BF16))
    rows = [
        row("fa2", "peer", fp16, 100.0), row("fa2", "peer", bf16, 200.0),
        row(ampere, "kernel", fp16, 110.0), row(hopper, "kernel", bf16, 300.0),
        replace(row("attention", "kernel", bf16, 320.0), kernel=hopper),
    ]  # fmt: skip
    path = tmp_path / "two.json"
    Results(rows, {"BF16": 781.0, "FP16": 760.0}).save(path)
    return path


def test_no_heat_map_mixes_families_or_types(tmp_path: Path) -> None:
    from flash_helpers.report.figures import draw

    report = load_report([two_families(tmp_path)])
    ratios = {title: part.ratios() for title, part in report.parts()}
    assert ratios == {
        "Ampere family, fp16": {("FP16", 128, False): {4096: pytest.approx(1.1)}},
        "Hopper family, bf16": {("BF16", 128, False): {4096: pytest.approx(1.5)}},
        "attention(), bf16": {("BF16", 128, False): {4096: pytest.approx(1.6)}},
    }
    panels = draw(report)["ratio"].axes
    assert [axis.get_title(loc="left") for axis in panels] == list(ratios)
    for axis, (title, families) in zip(panels, ratios.items(), strict=True):
        dtype = title.rpartition(" ")[2]
        assert [label.get_text().startswith(dtype) for label in axis.get_yticklabels()] == [True] * len(
            families
        )
    assert len({axis.images[0].get_clim() for axis in panels}) == 1  # a colour means the same everywhere


def test_a_processor_has_no_ceiling(tmp_path: Path) -> None:
    problem = Problem(DType.BF16, 1, 8, 512, 64)
    on_cpu = [
        replace(row(name, kind, problem, 0.3), environment={"gpu": "cpu", "torch": "2.13.0"})
        for name, kind in (("attention", "kernel"), ("sdpa-cpu", "peer"))
    ]
    path = tmp_path / "cpu.json"
    results = Results(on_cpu, {"BF16": 0.0971})  # as earlier versions measured it
    results.save(path)
    write_report([path], tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "matrix product" not in page
    assert "<td>0.3</td>" in page  # TFLOP/s, which one decimal would have rounded as it does 0.04
    headers = [str(column.header) for column in results_table(results).columns]
    assert not any("matmul" in header for header in headers)
    assert any(
        "matmul" in str(c.header) for c in results_table(Results(recorded_rows(), {"BF16": 781.0})).columns
    )


def test_small_rates_keep_their_digits(tmp_path: Path) -> None:
    problem = Problem(DType.BF16, 1, 8, 512, 64)
    path = tmp_path / "slow.json"
    Results(
        [row("attention", "kernel", problem, 0.0432), row("fa2", "peer", problem, 0.05)], {"BF16": 0.25}
    ).save(path)
    write_report([path], tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<td>0.0432</td>" in page
    assert "matrix product 0.25 TFLOP/s (BF16)" in page
