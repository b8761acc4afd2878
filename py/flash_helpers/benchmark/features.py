"""What each feature costs and gives, beside the peers that have it.

``python -m flash_helpers.benchmark.features --out DIR`` times causal, windows, grouped heads, sequences of
different lengths, one query over a cache of 1k to 128k keys (beside the card's copy rate, measured in the
same run), and what a plain kernel would lose if it were compiled for windows too. Outputs are compared with a
float32 reference first: what is wrong is not timed. All contestants of a row are timed in turns, in random
order.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from flash_helpers.benchmark.build_ahead import build_ahead
from flash_helpers.benchmark.case_row import CaseRow, measure_case, names_to_show
from flash_helpers.benchmark.cases import SCALE_HELP, Case, scale_on
from flash_helpers.benchmark.contestants import (
    ALL_CONTESTANTS,
    CONTESTANTS,
    OURS,
    Contestant,
    select_contestants,
)
from flash_helpers.benchmark.copy_rate import COPY_BYTES, copy_rate
from flash_helpers.benchmark.ending import end_with
from flash_helpers.benchmark.environment import environment
from flash_helpers.benchmark.measuring import DeviceLostError
from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.benchmark.runner import default_device
from flash_helpers.benchmark.window_cost import PLAIN, cost_of_windows, with_windows
from flash_helpers.console.alone import run_alone
from flash_helpers.console.errors import shown_errors
from flash_helpers.console.output import console_for
from flash_helpers.console.writable import check_folder

BENCHMARK, WHAT = "features", "what each feature costs and gives, beside the peers that have it"
FILE = "features.json"
TOKENS, HEADS, HEADS_KV = 16384, 32, 8
CACHE_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # thousands (1024) of keys
CACHE_BATCHES = (1, 8, 32)
CACHE_BYTES = 24 << 30  # caches beyond this are left out
ROUNDS = 7
COMPILING = ("fa4",)  # seconds for each new kind of problem


def all_cases(scale: int = 1) -> Iterator[Case]:
    """Every row; ``scale`` divides all lengths, for quick runs."""
    tokens = TOKENS // scale
    for seq in (2048, 8192, 16384):
        n = seq // scale
        yield Case("causal", tokens // n, n, n, 16, 16)
        yield Case("causal", tokens // n, n, n, 16, 16, causal=True)
    for seq, window in itertools.product((8192, 16384), (512, 1024, 4096)):
        n = seq // scale
        yield Case("window", tokens // n, n, n, 16, 16, causal=True, window=window // scale)
    for seq in (2048, 8192):
        n = seq // scale
        yield Case("grouped heads", tokens // n, n, n, HEADS, HEADS_KV, causal=True)
    uneven = tuple(max(1, n // scale) for n in (4096, 200, 1700, 64, 3000, 900, 2500, 33, 3891))
    even = (2048 // scale,) * 8
    for lengths in (uneven, even):
        n = max(lengths)
        yield Case("variable length", len(lengths), n, n, 16, 16, causal=True, lengths=lengths)
    for batch, thousands in itertools.product(CACHE_BATCHES, CACHE_LENGTHS):
        case = Case("decode", batch, 1, thousands * 1024 // scale, HEADS, HEADS_KV)
        if case.cache_bytes() <= CACHE_BYTES // scale**2:
            yield case


def mode_of(case: Case, device: torch.device) -> str:
    """Which time is measured: a cache is read from memory, not from L2, where the call before has left it."""
    return "cold" if case.feature == "decode" and device.type == "cuda" else "hot"


def rate_of(row: CaseRow) -> float:
    """Of ours: FLOP a second, or for a single query bytes of K and V a second; 0: it has no time."""
    own = row.milliseconds.get(OURS)
    work = row.case.cache_bytes() if row.case.feature == "decode" else row.case.flop()
    return work / (own.median * 1e-3) if own else 0.0


def table_of(rows: Sequence[CaseRow], copied: float) -> Table:
    """A line a case: ours as a rate, the others as their time over ours.

    Args:
        rows: in order.
        copied: bytes a second of a copy, which the rates of caches are a part of.
    """
    names = names_to_show(rows, CONTESTANTS)
    table = Table("feature", "problem", "ours, us", "rate", *(f"{name} / ours" for name in names))
    for row in rows:
        own, rate = row.milliseconds.get(OURS), rate_of(row)
        if own is None:
            one = row.measured.get(OURS)
            said = "not measured" if one is None else f"{one.status}: {one.reason}"
            table.add_row(row.case.feature, row.case.label(), said, "", *(row.cell(name) for name in names))
            continue
        if row.case.feature == "decode":
            shown = f"{rate / 1e9:.0f} GB/s, {100 * rate / copied:.0f} % of a copy"
        else:
            shown = f"{rate / 1e12:.0f} TFLOP/s"
        cells = [f"{1e3 * own.median:.1f}", shown, *(row.cell(name) for name in names)]
        table.add_row(row.case.feature, row.case.label(), *cells)
    return table


def run(
    out: Path, device: torch.device, seconds: float, contestants: Sequence[Contestant], scale: int = 1
) -> list[CaseRow]:
    """Measures, saving after each row, until the time is over; prints the table.

    Args:
        out: folder of ``features.json``.
        device: where.
        seconds: no row begins later; after 0.7 of them contestants that compile at first use are left out.
        contestants: who.
        scale: divides all lengths.
    """
    begin, rows = time.monotonic(), list[CaseRow]()
    cases = list(all_cases(scale))
    skipped = list[str]()
    facts: dict[str, Any] = {"skipped": skipped}
    file = ResultFile(BENCHMARK, WHAT, environment=environment(device), facts=facts)
    path = out / FILE
    facts["build_seconds"] = build_ahead([PLAIN, *cases], device, with_windows)
    copied = copy_rate(device, COPY_BYTES // scale, ROUNDS)
    facts["copy_bytes_per_second"] = copied
    console = console_for()
    try:
        facts["cost_of_windows"] = cost_of_windows(device, 2 * ROUNDS)
        # What nobody else can say first: decoding and windows.
        for case in sorted(cases, key=lambda case: case.feature not in ("decode", "window")):
            passed = time.monotonic() - begin
            if passed > seconds:
                skipped.append(case.label())
                continue
            here = [c for c in contestants if c.name not in COMPILING or passed < 0.7 * seconds]
            rows.append(measure_case(case, mode_of(case, device), here, device, ROUNDS))
            file.rows += rows[-1].to_rows()
            file.save(path)
    except DeviceLostError as lost:
        facts["stopped"] = f"{lost}. The CUDA context is lost: the rest is not measured"
        console.print(facts["stopped"], style="red", markup=False)
    file.save(path)
    console.print(table_of(rows, copied))
    console.print(f"copy: {copied / 1e9:.0f} GB/s read and written")
    cost = facts.get("cost_of_windows", {})
    if "plain_over_windowed" in cost:
        console.print(f"plain kernel / same compiled for windows: {cost['plain_over_windowed']:.4f}")
    for name, why in cost.get("not_timed", {}).items():
        console.print(f"cost of windows, {name} kernel: {why}", style="red", markup=False)
    for text in sorted({text for row in rows for text in row.remarks()}):
        console.print(text, markup=False)
    console.print(f"{len(rows)} rows, {len(skipped)} skipped, {time.monotonic() - begin:.0f} s; {path}")
    return rows


def main(
    out: Annotated[Path, typer.Option(help="folder of features.json")] = Path("benchmarks/results"),
    seconds: Annotated[float, typer.Option(help="no row begins after this")] = 90.0,
    contestants: Annotated[str, typer.Option(help="names joined by commas")] = ALL_CONTESTANTS,
    scale: Annotated[int, typer.Option(min=0, help=SCALE_HELP)] = 0,
) -> None:
    """What each feature costs and gives, on the device that is there."""
    with shown_errors():
        chosen = select_contestants(contestants)
        check_folder(out, "--out")
        device = default_device()
        run(out, device, seconds, chosen, scale_on(device, scale))
        end_with(ResultFile.load(out / FILE))


if __name__ == "__main__":
    run_alone(main)
