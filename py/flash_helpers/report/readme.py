"""Tables between markers of a Markdown file, made anew from result files.

A marker pair is ``<!-- results: NAME -->`` and ``<!-- end results -->``; NAME is a key of ``TABLES``.
Everything between the two is replaced. ``<!-- results: NAME of FILE -->`` is filled only from the result file
of that name, so that one page can show several, ``<!-- results: NAME of FILE in MODE -->`` from its timings
in one mode. ``OF_FILES`` are tables of other kinds of files, which have to be named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean

from flash_helpers.report.data import Report, family_label, load_report
from flash_helpers.report.feature_table import feature_table
from flash_helpers.report.lead_table import lead_table
from flash_helpers.report.page import facts_line, ratio_rows

_MARKED = re.compile(
    r"(?P<begin><!-- results: (?P<name>[\w-]+)(?: of (?P<file>[\w.-]+)(?: in (?P<mode>\w+))?)? -->\n).*?"
    r"(?P<end><!-- end results -->)",
    re.DOTALL,
)


def update_readme(path: Path, report: Report, sources: Sequence[Path] = ()) -> bool:
    """Replaces what stands between the markers of a Markdown file; writes only when it differs.

    Args:
        path: the Markdown file.
        report: the results.
        sources: the files that they are from. Tables of other files stay as they are.

    Returns:
        Whether the file changed.

    Raises:
        ValueError: see ``marked_text``; results that a table can't be made of.
        ResultFileError: a file whose table is wanted is no result file.
    """
    text = marked_text(path)
    named = {source.name: source for source in sources}

    def replacement(match: re.Match[str]) -> str:
        shown = report
        if match["file"] is not None:
            if match["file"] not in named:
                return match[0]
            if make := OF_FILES.get(match["name"]):
                return f"{match['begin']}\n{make(named[match['file']])}\n\n{match['end']}"
            shown = load_report([named[match["file"]]], match["mode"] or report.mode)
        table = TABLES[match["name"]](shown)
        facts = "" if match["name"] == SUMMARY else f"_{facts_line(shown)}_\n\n"
        return f"{match['begin']}\n{table}\n\n{facts}{match['end']}"

    new = _MARKED.sub(replacement, text)
    if new != text:
        path.write_text(new, encoding="utf-8")
    return new != text


def marked_text(path: Path) -> str:
    """A Markdown file with tables to fill.

    Raises:
        ValueError: it can't be read, has no markers, or one of a name that there is no table for.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read as a Markdown file: {error}") from error
    found = list(_MARKED.finditer(text))
    if not found:
        raise ValueError(f"{path} has no '<!-- results: NAME -->' and '<!-- end results -->' to fill")
    if unknown := [match["name"] for match in found if match["name"] not in (*TABLES, *OF_FILES)]:
        known = ", ".join((*TABLES, *OF_FILES))
        raise ValueError(f"{path}: no table is named {unknown[0]!r}; known: {known}")
    if alone := [m["name"] for m in found if m["name"] in OF_FILES and m["file"] is None]:
        raise ValueError(
            f"{path}: a table of {alone[0]} needs its file: <!-- results: {alone[0]} of FILE.json -->"
        )
    return text


def ratio_table(report: Report) -> str:
    """Best kernel over best peer by size."""
    header, rows = ratio_rows(report)
    return _markdown(header, rows)


def tflops_table(report: Report) -> str:
    """TFLOP/s of every implementation by size; the fastest of a row is bold."""
    names = list(dict.fromkeys(name for family in report.families() for name in report.curves(family)))
    rows = []
    for family in report.families():
        curves = report.curves(family)
        for seq_len in sorted({s for curve in curves.values() for s in curve}):
            rates = [curves.get(name, {}).get(seq_len) for name in names]
            best = max(rate for rate in rates if rate is not None)
            cells = ["" if r is None else f"**{r:.0f}**" if r == best else f"{r:.0f}" for r in rates]
            rows.append([family_label(family), str(seq_len), *cells])
    return _markdown(["TFLOP/s", "seq_len", *names], rows)


def ratio_summary(report: Report) -> str:
    """A sentence on the ratios of each element type: the mean, how many are at or above 1, and the lowest.

    Raises:
        ValueError: no size at which a kernel and a peer were timed.
    """
    ratios = report.ratios()
    if not ratios:
        raise ValueError("the results hold no size at which both a kernel and a peer were timed")
    sentences = []
    for dtype in dict.fromkeys(name for name, _, _ in ratios):
        rows = ((f, row) for f, row in ratios.items() if f[0] == dtype)
        cells = {(f, s): ratio for f, row in rows for s, ratio in row.items()}
        ahead = sum(ratio >= 1 for ratio in cells.values())
        (family, seq_len), lowest = min(cells.items(), key=lambda item: item[1])
        sentences.append(
            f"{dtype.lower()}: geometric mean {geometric_mean(cells.values()):.3f}, {ahead} of {len(cells)} "
            f"cells at or above 1, the lowest {lowest:.3f} ({family_label(family)}, {seq_len})."
        )
    return " ".join(sentences)


def ladder_table(report: Report) -> str:
    """The steps of the ladder and what each gained.

    Raises:
        ValueError: the results hold no step.
    """
    found = report.ladder()
    if found is None:
        raise ValueError("the results hold no step of the ladder; measure with: flash-attention ladder")
    problem, steps = found
    rows, previous = [], None
    for number, (name, rate) in enumerate(steps, start=1):
        gain = f"{rate / previous:.3f}" if previous else ""
        rows.append([str(number), f"`{name}`", f"{rate:.1f}", gain])
        previous = rate
    return _markdown(["step", problem.label(), "TFLOP/s", "over the step before"], rows)


SUMMARY = "summary"
OF_FILES: dict[str, Callable[[Path], str]] = {"features": feature_table, "lead": lead_table}
"""Tables of another kind of file, which has to be named."""
TABLES: dict[str, Callable[[Report], str]] = {
    "ratio": ratio_table,
    SUMMARY: ratio_summary,
    "tflops": tflops_table,
    "ladder": ladder_table,
}


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " --: |" * (len(header) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
