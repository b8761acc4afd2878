"""Every feature beside every peer: ``python -m flash_helpers.benchmark.grid --out DIR``.

The rows are those of ``grid_cases``, with ``--gradients`` those of ``gradient_cases``. Kernels are built
before, in parallel, and so are those of peers that compile at their first use (``warm_up``). Each output is
compared with a float32 reference; who is wrong, or has no such feature, is not timed and says why. The file
is written after each row. A row ends with what there is when its time is over, and none begins when that of
the run is.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from flash_helpers.benchmark.beginnings import beginnings
from flash_helpers.benchmark.build_ahead import build_ahead
from flash_helpers.benchmark.case_row import PEERS, CaseRow, measure_case, names_to_show
from flash_helpers.benchmark.cases import SCALE_HELP, Case, scale_on, scaled_cases
from flash_helpers.benchmark.contestants import (
    ALL_CONTESTANTS,
    CONTESTANTS,
    OURS,
    REPEATABLE,
    Contestant,
    named_kernel,
    select_contestants,
)
from flash_helpers.benchmark.copy_rate import COPY_BYTES, copy_rate
from flash_helpers.benchmark.ending import end_with
from flash_helpers.benchmark.environment import environment
from flash_helpers.benchmark.features import COMPILING, mode_of
from flash_helpers.benchmark.gradient_cases import gradient_cases
from flash_helpers.benchmark.grid_cases import grid_cases
from flash_helpers.benchmark.measuring import DeviceLostError
from flash_helpers.benchmark.result_file import FORWARD, ResultFile
from flash_helpers.benchmark.runner import default_device
from flash_helpers.benchmark.warm_up import warm_up
from flash_helpers.console.alone import run_alone
from flash_helpers.console.errors import shown_errors
from flash_helpers.console.output import console_for
from flash_helpers.console.writable import check_folder
from flash_helpers.kernels.parsing import parse_kernel_name_into_config
from flash_helpers.kernels.problem import BACKWARD

BENCHMARK, WHAT = "grid", "every feature, head size and hard shape beside every peer that has it"
FILE, GRADIENTS_FILE = "grid.json", "gradient-grid.json"
ROUNDS = 7
ROW_SECONDS = 3.0  # of the rounds of a row
WARM_UP_PART = 0.4  # of the run's time, at most


def run(
    out: Path,
    device: torch.device,
    seconds: float,
    contestants: Sequence[Contestant],
    cases: Sequence[Case] | None = None,
    rounds: int = ROUNDS,
    jobs: int | None = None,
    gradients: bool = False,
    scale: int = 1,
) -> list[CaseRow]:
    """Builds, measures and saves after each row, until the time is over; prints the table.

    Args:
        out: folder of ``grid.json``, or ``gradient-grid.json``.
        device: where.
        seconds: no row begins later.
        contestants: who.
        cases: the rows; None: the whole grid.
        rounds: measurements of each.
        jobs: processes in which peers compile ahead, 0: none does; None: as many as there are cores.
        gradients: the whole grid is that of gradients; the file is of the backward pass.
        scale: divides all lengths.
    """
    begin, rows, skipped = time.monotonic(), list[CaseRow](), list[str]()
    cases = scaled_cases(all_cases(gradients) if cases is None else cases, scale)
    path = out / file_of(gradients)
    facts: dict[str, Any] = {"skipped": skipped}
    direction = BACKWARD if gradients else FORWARD
    file = ResultFile(BENCHMARK, WHAT, environment=environment(device), facts=facts, direction=direction)
    console = console_for()
    facts["build_seconds"] = build_ahead(cases, device, repeatable=REPEATABLE in contestants)
    with tempfile.TemporaryDirectory() as compiled:
        compiling = [c.name for c in contestants if c.name in COMPILING and device.type == "cuda"]
        workers = (os.cpu_count() or 1) if jobs is None else jobs
        for name in compiling if workers else ():
            facts[f"{name}_compile_seconds"] = warm_up(
                cases, name, Path(compiled), workers, WARM_UP_PART * seconds
            )
        facts["copy_bytes_per_second"] = copied = copy_rate(
            device, COPY_BYTES // (1 if device.type == "cuda" else 64), rounds
        )
        try:
            for case in cases:
                if time.monotonic() - begin > seconds:
                    skipped.append(f"{case.feature}: {case.label()}")
                    continue
                row = measure_case(case, mode_of(case, device), contestants, device, rounds, ROW_SECONDS)
                rows.append(row)
                file.rows += row.to_rows()
                file.save(path)
        except DeviceLostError as lost:
            facts["stopped"] = f"{lost}. The CUDA context is lost: the rest is not measured"
            console.print(facts["stopped"], style="red", markup=False)
    file.save(path)
    console.print(table_of(rows))
    for text in refusals(rows):
        console.print(text, markup=False)
    ahead = [ratio for row in rows if (ratio := lead(row)) is not None]
    console.print(
        f"{len(rows)} rows, {len(skipped)} skipped; {sum(r >= 1 for r in ahead)} of {len(ahead)} at or above "
        f"the best peer, the lowest {min(ahead, default=0):.2f}; copy {copied / 1e9:.0f} GB/s; "
        f"{time.monotonic() - begin:.0f} s; {path}",
        markup=False,
    )
    return rows


def file_of(gradients: bool) -> str:
    """The name of the result file."""
    return GRADIENTS_FILE if gradients else FILE


def lead(row: CaseRow) -> float | None:
    """The best peer's time over ours; None: nobody else, or ours has no time."""
    ratios = [row.over(name, OURS) for name in row.milliseconds if name in PEERS]
    return min((r for r in ratios if r is not None), default=None)


def table_of(rows: Sequence[CaseRow]) -> Table:
    """A line a case: our time, the best peer's over ours, and each one's."""
    names = names_to_show(rows, (*CONTESTANTS, REPEATABLE))
    table = Table("feature", "problem", "ours, us", "best / ours", *(f"{name} / ours" for name in names))
    for row in rows:
        own, ratio = row.milliseconds.get(OURS), lead(row)
        time_text = f"{1e3 * own.median:.1f}" if own else _why_not(row)
        cells = [time_text, "" if ratio is None else f"{ratio:.3f}", *(row.cell(name) for name in names)]
        table.add_row(row.case.feature, row.case.label(), *cells)
    return table


def _why_not(row: CaseRow) -> str:
    one = row.measured.get(OURS)
    return "not measured" if one is None else f"{one.status}: {one.reason}"


def refusals(rows: Sequence[CaseRow]) -> list[str]:
    """A line for each contestant and reason why it has no time, with the number of rows."""
    counted = Counter(
        f"{name}: {one.status}: {one.reason}"
        for row in rows
        for name, one in row.measured.items()
        if one.status != "ok"
    )
    return [f"{text} ({n} rows)" if n > 1 else f"{text} (1 row)" for text, n in sorted(counted.items())]


def main(
    out: Annotated[Path, typer.Option(help=f"folder of {FILE}")] = Path("benchmarks/results"),
    seconds: Annotated[float, typer.Option(help="no row begins after this")] = 240.0,
    contestants: Annotated[str, typer.Option(help="names joined by commas")] = ALL_CONTESTANTS,
    rounds: Annotated[int, typer.Option(min=1, help="measurements of each")] = ROUNDS,
    only: Annotated[str, typer.Option(help="features joined by commas; empty: all")] = "",
    kernels: Annotated[str, typer.Option(help="short forms joined by semicolons, timed too")] = "",
    jobs: Annotated[
        int, typer.Option(min=-1, help="processes in which peers compile ahead; -1: one a core")
    ] = -1,
    gradients: Annotated[bool, typer.Option("--gradients", help="the grid of gradients instead")] = False,
    scale: Annotated[int, typer.Option(min=0, help=SCALE_HELP)] = 0,
) -> None:
    """Every feature beside every peer, on the device that is there."""
    with shown_errors():
        chosen = select_contestants(contestants)
        names = [name.strip() for name in kernels.split(";") if name.strip()]
        if names and gradients:
            raise ValueError(
                "--kernels is given with --gradients, whose rows are of the library's choice: leave one out"
            )
        chosen += [named_kernel(parse_kernel_name_into_config(name)) for name in names]
        chosen += [REPEATABLE] if gradients else []
        check_folder(out, "--out")
        cases, device, workers = select_cases(only, gradients), default_device(), None if jobs < 0 else jobs
        run(out, device, seconds, chosen, cases, rounds, workers, gradients, scale_on(device, scale))
        end_with(ResultFile.load(out / file_of(gradients)))


def all_cases(gradients: bool) -> list[Case]:
    """The rows of the grid, or of the grid of gradients."""
    return list(gradient_cases() if gradients else grid_cases())


def select_cases(text: str, gradients: bool = False) -> list[Case] | None:
    """The rows of some features, named by their beginnings; None: all.

    Raises:
        ValueError: an unknown feature; the message lists the known ones.
    """
    cases = all_cases(gradients)
    names = beginnings(text, (case.feature for case in cases), "feature")
    return [case for case in cases if case.feature.startswith(names)] if names else None


if __name__ == "__main__":
    run_alone(main)
