"""What ``flash-attention report`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flash_helpers.report.data import Report, load_report


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


def write_figures(report: Report, out: Path) -> list[Path]:
    """The page and the figures of a loaded report."""
    try:
        from flash_helpers.report.figures import FIGURES, draw
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the report needs matplotlib: pip install 'flash-attention-kernels[report]'"
        ) from error
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
