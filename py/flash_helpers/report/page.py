"""The report as one HTML file that needs no network and follows the reader's light or dark setting."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from flash_helpers.benchmark.table import shown_rate
from flash_helpers.report.data import Report, family_label, seq_lens_of

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1d1d1f; --faint: #666; --grid: #d8d8dc; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --ink: #e6e6e6; --faint: #a0a0a8; --grid: #3a3d44; }
}
body { background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
p.facts, figcaption { color: var(--faint); font-size: .9rem; }
figure { margin: 1rem 0; overflow-x: auto; } svg { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--grid); padding: .25rem .6rem;
         text-align: right; white-space: nowrap; }
:is(th, td):is(:first-child, :last-child) { text-align: left; }
td:last-child { white-space: normal; min-width: 18rem; }
tr.fastest td { font-weight: 600; }
"""

CAPTIONS = {
    "tflops": "FLOP = 4 · batch · heads · d_head · visible pairs. Medians; all implementations measured in "
    "one process, in random order. This library: at each size the fastest of the configurations that were "
    "measured.",
    "ratio": "A panel for each family of kernels and element type. Above 1 (purple): its fastest "
    "configuration is faster than the fastest peer; below 1 (orange): slower. All figures are of the card "
    "named above.",
    "ladder": "Each step of optimisation is a configuration of the same kernel. Hatched: a step that lost.",
    "roofline": "Bytes are the fewest possible: Q, K, V read once, O written once.",
    "landscape": "Each point is one configuration.",
}


def html_page(
    report: Report, figures: Mapping[str, tuple[str, str]], title: str = "Attention kernels"
) -> str:
    """The whole page.

    Args:
        report: the data of the tables.
        figures: name to (title, SVG element).
        title: of the page.
    """
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="facts">{html.escape(facts_line(report))}</p>',
    ]
    for name, (heading, svg) in figures.items():
        parts.append(f"<h2>{html.escape(heading)}</h2><figure>{svg}")
        parts.append(f"<figcaption>{html.escape(CAPTIONS[name])}</figcaption></figure>")
    parts.append(_rows_table(report))
    if report.missing:
        parts.append("<h2>Not timed</h2>")
        rows = [(r.problem.label(), r.status, r.shown_name, r.reason) for r in report.missing]
        parts.append(_table(("problem", "status", "implementation", "reason"), rows))
    if report.skipped:
        parts.append("<h2>Files that are not shown</h2>")
        parts += [f"<p>{html.escape(reason)}</p>" for reason in report.skipped]
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


def facts_line(report: Report) -> str:
    """On what the numbers were measured."""
    facts = report.rows[0].environment
    shown = [str(facts.get("gpu"))]
    shown += [f"{name} {facts[name]}" for name in ("driver", "cuda", "torch", "cudnn") if facts.get(name)]
    shown += [f"commit {facts['git_commit']}"] if facts.get("git_commit") else []
    for name, rate in report.matrix_tflops.items():
        digits = f"{rate:.0f}" if rate >= 10 else f"{rate:.3g}"
        shown.append(f"matrix product {digits} TFLOP/s ({name})")
    return "; ".join(shown) + f"; timing: {report.mode}"


def ratio_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the ratio table: best kernel over best peer."""
    ratios = report.ratios()
    lengths = seq_lens_of(ratios)
    header = ["best kernel / best peer", *map(str, lengths)]
    rows = [
        [family_label(family), *(f"{row[s]:.3f}" if s in row else "" for s in lengths)]
        for family, row in ratios.items()
    ]
    return header, rows


def _rows_table(report: Report) -> str:
    header = ("problem", "TFLOP/s", "ms", "p20", "p80", "relative error", "implementation")
    rows, fastest, previous = [], [], None
    for row in report.rows_in_order():
        timing = row.timings[report.mode]
        fastest.append(row.problem != previous)
        previous = row.problem
        rows.append(
            (
                row.problem.label(),
                shown_rate(row.tflops(report.mode)),
                f"{timing.median:.4f}",
                *timing.spread,
                f"{row.error:.1e}" if row.error is not None else "",
                row.shown_name,
            )
        )
    return "<h2>All rows</h2>" + _table(header, rows, fastest)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[bool] | None = None) -> str:
    """A table whose last column may wrap; ``marked`` rows are bold."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = ""
    for row, bold in zip(rows, marked or [False] * len(rows), strict=True):
        # A kernel's name may break between its choices.
        cells = "".join(f"<td>{html.escape(text).replace('+', '+<wbr>')}</td>" for text in row)
        body += f'<tr class="fastest">{cells}</tr>' if bold else f"<tr>{cells}</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
