"""Measured rows as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from flash_helpers.benchmark.results import Results, Row, best_peer


def results_table(results: Results, mode: str = "hot", title: str = "") -> Table:
    """TFLOP/s, ratio to the best peer, and percent of the card's measured matrix rate.

    Args:
        results: rows of one card.
        mode: the timing that decides the ratio.
        title: above the table.

    Raises:
        DifferentCardsError: rows of different cards.
    """
    ceilings = {} if _on_cpu(results) else results.matrix_tflops
    modes = [m for m in dict.fromkeys(m for row in results.rows for m in row.timings)]
    table = Table(title=title or None, title_justify="left")
    table.add_column("problem", no_wrap=True)
    table.add_column("implementation", overflow="fold")
    for name in modes:
        table.add_column(f"{name}\nTFLOP/s", justify="right")
    table.add_column("ms", justify="right")
    table.add_column("p20-p80", justify="right")
    table.add_column("/ best\npeer", justify="right")
    if ceilings:
        table.add_column("% of\nmatmul", justify="right")
    table.add_column("error", justify="right")
    previous = None
    for row in results.rows:
        if previous is not None and row.problem != previous:
            table.add_section()
        name = row.shown_name + (f"  [{row.status}] {row.reason}" if row.reason else "")
        table.add_row(
            row.problem.label(), Text(name), *_cells(row, results, ceilings, modes, mode), style=_style(row)
        )
        previous = row.problem
    return table


def ratio_to_best_peer(row: Row, rows: Sequence[Row], mode: str = "hot") -> float | None:
    """TFLOP/s of ``row`` over those of the fastest peer on the same problem, or None."""
    mine, peer = row.tflops(mode), best_peer(rows, row.problem, mode)
    return mine / (peer.tflops(mode) or float("nan")) if mine and peer else None


def shown_rate(tflops: float | None) -> str:
    """TFLOP/s with one decimal, small ones with three digits."""
    if tflops is None:
        return ""
    return f"{tflops:.1f}" if tflops >= 10 else f"{tflops:.3g}"


def _on_cpu(results: Results) -> bool:
    """Whether the rows are of a processor, whose matrix rate is no ceiling."""
    return any(row.environment.get("gpu") == "cpu" for row in results.rows)


def _cells(
    row: Row, results: Results, ceilings: Mapping[str, float], modes: Sequence[str], mode: str
) -> list[str]:
    error = f"{row.error:.1e}" if row.error is not None else ""
    if not row.timings:
        return [*("" for _ in modes), "", "", "", *([""] if ceilings else []), error]
    timing = row.timings.get(mode) or next(iter(row.timings.values()))
    ratio = ratio_to_best_peer(row, results.rows, mode)
    ceiling, rate = ceilings.get(row.problem.dtype.name), row.tflops(mode)
    share = f"{100 * rate / ceiling:.0f}" if rate and ceiling else ""
    return [
        *(shown_rate(row.tflops(m)) for m in modes),
        f"{timing.median:.4f}" + ("" if timing.launch_hidden else "*"),
        "-".join(timing.spread),
        f"{ratio:.3f}" if ratio else "",
        *([share] if ceilings else []),
        error,
    ]


def _style(row: Row) -> str:
    return {"ok": "", "unavailable": "dim", "wrong": "bold red", "failed": "red"}[row.status]
