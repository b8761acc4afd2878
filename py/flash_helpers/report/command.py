"""What ``flash-attention report`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flash_helpers.console.output import console_for, write_json
from flash_helpers.console.writable import check_file, check_folder
from flash_helpers.report.data import Report, load_report
from flash_helpers.report.readme import marked_text, update_readme


def write_report(paths: Sequence[Path], out: Path, mode: str = "hot") -> list[Path]:
    """Writes ``index.html`` and each figure as SVG and PNG.

    Args:
        paths: result files of one card.
        out: folder.
        mode: which timing to show.

    Returns:
        The files written.

    Raises:
        ResultFileError, DifferentCardsError, ValueError: see ``load_report``.
        ModuleNotFoundError: no matplotlib; the message says how to get it.
    """
    report = load_report(paths, mode)
    return write_figures(report, out)


def report_command(
    paths: Sequence[Path],
    out: Path,
    mode: str = "hot",
    readme: Path | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> list[Path]:
    """Writes the report, fills the tables of a README, and says which files there are.

    Args:
        paths, out, mode: as in ``write_report``.
        readme: a file with marked tables.
        json_path: write the files' names and the shown TFLOP/s there.

    Raises:
        as ``write_report``; NotWritableError: ``out`` or ``json_path`` can't be written;
        ValueError: ``readme`` has no marked table, or one of an unknown name.
    """
    check_file(json_path)
    check_folder(out, "--out")
    if readme is not None:
        marked_text(readme)  # a table that can't be filled is refused before the figures are drawn
    console = console or console_for(json_path)
    report = load_report(paths, mode)
    for reason in report.skipped:
        console.print(f"skipped: {reason}", style="yellow", markup=False, soft_wrap=True)
    written = write_figures(report, out)
    for path in written:
        console.print(str(path), markup=False, soft_wrap=True)
    changed = readme is not None and update_readme(readme, report, paths)
    if readme is not None:
        text = "tables updated" if changed else "already up to date"
        console.print(f"{readme}: {text}", markup=False, soft_wrap=True)
    rows = [
        {"implementation": row.implementation, "problem": row.problem.to_json(), "tflops": row.tflops(mode)}
        for row in report.rows
    ]
    write_json(
        json_path,
        {"mode": mode, "files": list(map(str, written)), "skipped": list(report.skipped), "rows": rows},
    )
    return written


def write_figures(report: Report, out: Path) -> list[Path]:
    """The page and the figures of a loaded report."""
    try:
        from flash_helpers.report.figures import FIGURES, draw
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the report needs matplotlib: pip install matplotlib") from error
    from flash_helpers.report.page import html_page
    from flash_helpers.report.style import standalone, to_png, to_svg

    out.mkdir(parents=True, exist_ok=True)
    written, inline = [], {}
    for name, figure in draw(report).items():
        title = FIGURES[name][0]
        svg = to_svg(figure, title)
        inline[name] = (title, svg)
        (out / f"{name}.svg").write_text(standalone(svg))
        (out / f"{name}.png").write_bytes(to_png(figure))
        written += [out / f"{name}.svg", out / f"{name}.png"]
    page = out / "index.html"
    page.write_text(html_page(report, inline))
    return [page, *written]
