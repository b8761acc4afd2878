"""The tables of ``docs/kernels/``, made from measured ladders and recorded instruction counts; the figures.

``python -m flash_helpers.report.kernel_pages`` writes them; with ``--check`` it says whether pages are up
to date. Where a page has ``<!-- ladder: FAMILY D_HEAD -->`` and ``<!-- end ladder -->``, what stands
between is replaced: each step of the family's ladder of today with its reason, and what it reached and
gained in the result file; a step that the file does not hold is shown as such. ``<!-- instructions: ampere
-->`` is followed by what ``python -m flash_helpers.build.gates --record`` kept. ``docs/measurements.md``
shows ``attention()`` and its peers as curves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from flash_helpers.build.gates import AMPERE_RECORD, TARGETS, load_record
from flash_helpers.console.alone import run_alone
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.ladders import LADDERS, get_ladder
from flash_helpers.problem import Problem
from flash_helpers.report.data import Report, load_report
from flash_helpers.report.page import facts_line

ROOT = Path(__file__).parents[3]
RESULT_FILE = ROOT / "benchmarks" / "results" / "h100-ladders.json"
BACKWARD_FILES = {  # ladders that were measured elsewhere
    family: RESULT_FILE.with_name(f"h200-{family.replace('_', '-')}-ladder.json")
    for family in LADDERS
    if family.endswith("_backward")
}
ATTENTION_FILES = {card: RESULT_FILE.with_name(f"{card}-attention.json") for card in ("h100", "h200")}
PAGES = ROOT / "docs" / "kernels"
FIGURES = PAGES / "figures"

_MARKED = re.compile(
    r"(?P<begin><!-- ladder: (?P<family>\w+) (?P<d_head>\d+) -->\n).*?(?P<end><!-- end ladder -->)", re.DOTALL
)
_INSTRUCTIONS = re.compile(
    r"(?P<begin><!-- instructions: ampere -->\n).*?(?P<end><!-- end instructions -->)", re.DOTALL
)
MISSING = "not measured"
SHOWN_LENGTH = 4096  # of the waterfall figure


def measured_ladders(results: Path = RESULT_FILE) -> dict[str, Report]:
    """What was measured, by family; families without a result file are left out.

    Args:
        results: of the forward pass.
    """
    paths = {family: BACKWARD_FILES.get(family, results) for family in LADDERS}
    reports = {path: load_report([path]) for path in set(paths.values()) if path.exists()}
    return {family: reports[path] for family, path in paths.items() if path in reports}


def filled(text: str, reports: Mapping[str, Report]) -> str:
    """A page with its tables made anew.

    Args:
        text: the page.
        reports: the measured ladders, by family.

    Raises:
        ValueError: a marker that names no ladder.
    """

    def replacement(match: re.Match[str]) -> str:
        table = ladder_section(match["family"], int(match["d_head"]), reports.get(match["family"]))
        return f"{match['begin']}\n{table}\n\n{match['end']}"

    text = _MARKED.sub(replacement, text)
    return _INSTRUCTIONS.sub(lambda m: f"{m['begin']}\n{instruction_table()}\n\n{m['end']}", text)


def instruction_table() -> str:
    """Instructions of the Ampere family's main loops for 256 products, by generation, from the record."""
    record = load_record(AMPERE_RECORD)
    rows = [["kernel (bf16)", *(f"sm_{target}" for target in TARGETS)]]
    for name in sorted(record, key=lambda n: (len(n.split(",")[1]), n)):
        counts = [str(record[name].get(str(target), "")) for target in TARGETS]
        rows.append([f"`{name.replace(' | ', '+')}`", *counts])
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    lines.insert(1, "| --- |" + " --: |" * len(TARGETS))
    return "\n".join(lines)


def ladder_section(family: str, d_head: int, report: Report | None) -> str:
    """The table of one ladder: a row a step, a column a length and mask; then the peers, then the facts."""
    rates = _rates_of(family, d_head, report)
    problems = sorted(rates, key=lambda problem: (problem.causal, problem.seq_len))
    names = {
        causal: {r.step.idea: r.config.short_form() for r in get_ladder(family, DType.BF16, d_head, causal)}
        for causal in (False, True)
    }
    columns = [_column(names[problem.causal], rates[problem]) for problem in problems]
    header = ["", "step", *(f"{p.seq_len}{', causal' if p.causal else ''}" for p in problems), "why"]
    rows = [
        [str(number), step.idea, *(column.get(step.idea, "–") for column in columns), step.why]
        for number, step in enumerate(LADDERS[family][d_head], start=1)
    ]
    peers = sorted({name for timed in rates.values() for name in timed if not name.startswith("(")})
    for name in peers:
        rows.append(["", name, *(f"{rates[p][name]:.0f}" if name in rates[p] else "" for p in problems), ""])
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    lines.insert(1, "| --: | --- |" + " --: |" * len(problems) + " --- |")
    if report is None or not problems:
        command = f"flash-attention ladder --family {family} --d-head {d_head} --causal both"
        return "\n".join([*lines, "", f"_Not measured yet: `{command}`_"])
    return "\n".join([*lines, "", f"_TFLOP/s (over the step before); {facts_line(report)}_"])


def write_figures(report: Report, folder: Path = FIGURES) -> list[Path]:
    """The waterfall of each ladder at ``SHOWN_LENGTH``, with and without a mask, as SVG; the files written.

    Raises:
        ModuleNotFoundError: no matplotlib.
    """
    import matplotlib

    from flash_helpers.report.figures import waterfall
    from flash_helpers.report.style import RC, standalone, to_svg

    written = []
    for family, d_heads in LADDERS.items():
        for d_head in d_heads:
            for problem, timed in _rates_of(family, d_head, report).items():
                rungs = get_ladder(family, problem.dtype, d_head, problem.causal)
                names = [(rung.step.idea, rung.config.short_form()) for rung in rungs]
                steps = [(idea, timed[name]) for idea, name in names if name in timed]
                if problem.seq_len != SHOWN_LENGTH or len(steps) < 2:
                    continue
                path = folder / figure_name(family, d_head, problem.causal)
                path.parent.mkdir(parents=True, exist_ok=True)
                with matplotlib.rc_context(RC):
                    svg = to_svg(waterfall(problem, steps), f"The {family} ladder, {problem.label()}")
                path.write_text(standalone(svg), encoding="utf-8")
                written.append(path)
    return written


def write_attention_figures(files: Mapping[str, Path], folder: Path = FIGURES) -> list[Path]:
    """TFLOP/s of ``attention()`` and its peers over the length, as ``attention-CARD.svg``; the files written.

    Args:
        files: short name of a card to the result file.
        folder: where to.

    Raises:
        ModuleNotFoundError: no matplotlib.
        ResultFileError: a file that can't be read.
    """
    import matplotlib

    from flash_helpers.report.figures import tflops_over_length
    from flash_helpers.report.style import RC, standalone, to_svg

    written = []
    for card, path in files.items():
        with matplotlib.rc_context(RC):
            figure = tflops_over_length(load_report([path]))
            assert figure is not None  # a report has a timed row at least
            svg = to_svg(figure, f"TFLOP/s over sequence length, {card.upper()}")
        written.append(folder / f"attention-{card}.svg")
        written[-1].write_text(standalone(svg), encoding="utf-8")
    return written


def figure_name(family: str, d_head: int, causal: bool) -> str:
    """The file of a ladder's waterfall."""
    return f"ladder-{family}-{d_head}{'-causal' if causal else ''}.svg"


def _rates_of(family: str, d_head: int, report: Report | None) -> dict[Problem, dict[str, float]]:
    """TFLOP/s by problem and implementation where the file has at least two steps of this ladder.

    Of several problems with the same mask and length, the one with most steps.
    """
    if d_head not in LADDERS.get(family, ()):
        raise ValueError(f"there is no ladder '{family} {d_head}'; there are: {LADDERS}")
    best: dict[tuple[bool, int], tuple[int, Problem, dict[str, float]]] = {}
    for problem, timed in (report.rates_by_problem() if report else {}).items():
        if (problem.dtype, problem.d_head) != (DType.BF16, d_head):
            continue
        names = {r.config.short_form() for r in get_ladder(family, problem.dtype, d_head, problem.causal)}
        mine = {name: rate for name, rate in timed.items() if name in names or not name.startswith("(")}
        count = len(names & set(mine))
        key = (problem.causal, problem.seq_len)
        if count > 1 and count > best.get(key, (0,))[0]:
            best[key] = (count, problem, mine)
    return {problem: mine for _, problem, mine in best.values()}


def _column(names: Mapping[str, str], timed: Mapping[str, float]) -> dict[str, str]:
    """What one problem's column says of each idea of its mask's ladder.

    Args:
        names: idea to the short form of its configuration, in order.
        timed: TFLOP/s by short form.
    """
    cells, before = {}, 0.0
    for idea, name in names.items():
        rate = timed.get(name)
        if rate is None:
            cells[idea] = MISSING
            continue
        cells[idea] = f"{rate:.0f} ({100 * (rate / before - 1):+.0f} %)" if before else f"{rate:.0f}"
        before = rate
    return cells


def main(
    results: Annotated[Path, typer.Option(help="result file of flash-attention ladder")] = RESULT_FILE,
    check: Annotated[bool, typer.Option("--check", help="write nothing; exit 1 if a page differs")] = False,
) -> None:
    """Fills the ladder tables of docs/kernels/ and draws the figures."""
    reports = measured_ladders(results)
    stale = []
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = filled(text, reports)
        if new == text:
            continue
        stale.append(page)
        if not check:
            page.write_text(new, encoding="utf-8")
    typer.echo(
        "\n".join(f"{page}: {'out of date' if check else 'updated'}" for page in stale) or "up to date"
    )
    if check and stale:
        raise typer.Exit(1)
    if results.exists() and not check:
        for path in [*write_figures(load_report([results])), *write_attention_figures(ATTENTION_FILES)]:
            typer.echo(path)


if __name__ == "__main__":
    run_alone(main)
