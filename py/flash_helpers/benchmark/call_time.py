"""What a call costs beside its kernel: ``python -m flash_helpers.benchmark.call_time --json FILE``.

Two tables, all contestants of a row timed in turns, in random order, in one process; whose output is wrong by
a float32 reference is not timed:

host   how long Python is busy with one call of a tiny problem, for which no queue fills up: ``forward``, and
       ``attention`` with an Ampere kernel and with the library's choice; one query over a cache, whose keys
       are split; packed sequences; and a call that records gradients with its backward pass.
call   wall time of a call of up to 1024 keys, or of one query over a cache: host and GPU, with one wait for a
       batch of calls.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from flash_helpers.benchmark.build_ahead import build_ahead
from flash_helpers.benchmark.case_row import CaseRow, measure_case, names_to_show
from flash_helpers.benchmark.cases import DTYPE, SCALE_HELP, Case, Inputs, scale_on
from flash_helpers.benchmark.contestants import (
    ALL_CONTESTANTS,
    CONTESTANTS,
    OURS,
    Call,
    Contestant,
    select_contestants,
)
from flash_helpers.benchmark.ending import end_with
from flash_helpers.benchmark.environment import environment
from flash_helpers.benchmark.implementations import UnavailableError
from flash_helpers.benchmark.measuring import DeviceLostError
from flash_helpers.benchmark.plan import MODES
from flash_helpers.benchmark.result_file import BOTH, FORWARD, ResultFile
from flash_helpers.benchmark.runner import default_device
from flash_helpers.benchmark.timers import timer_for
from flash_helpers.console.alone import run_alone
from flash_helpers.console.errors import shown_errors
from flash_helpers.console.output import console_for
from flash_helpers.console.writable import check_file
from flash_helpers.kernel_configs import get_kernel_progression_configs

BENCHMARK, WHAT = "call_time", "what a call costs beside its kernel: host time, and wall time of a call"
ROUNDS = 31
COMPARED_WITH = "fa2"  # whose host time the others' are shown as a part of
AMPERE = replace(get_kernel_progression_configs()[-1], dtype=DTYPE)


@dataclass(frozen=True)
class TimedCase:
    """A problem, and which time of it is wanted: ``host`` or ``call``."""

    mode: str
    case: Case


@dataclass
class CallRow:
    """The times of one case.

    Attributes:
        wanted: ``host`` or ``call``; the CPU knows the second alone.
        outcome: ``ours`` is ``attention`` with the library's choice.
    """

    wanted: str
    outcome: CaseRow


def all_cases() -> Iterator[TimedCase]:
    """Every row: host times, then call times by length and for one query."""
    yield TimedCase("host", Case("dense", 1, 128, 128, 8, 8))
    yield TimedCase("host", Case("decode", 1, 1, 4096, 32, 8))
    yield TimedCase("host", Case("variable length", 2, 64, 64, 8, 8, lengths=(64, 64)))
    for causal in (False, True):
        yield TimedCase("host", Case("gradients", 1, 128, 128, 8, 8, causal=causal, direction=BOTH))
    for causal in (False, True):
        for seq_len in (64, 128, 256, 512, 1024):
            yield TimedCase("call", Case("dense", 1, seq_len, seq_len, 16, 16, causal=causal))
    for batch in (1, 8):
        for keys in (1024, 4096, 16384):
            yield TimedCase("call", Case("decode", batch, 1, keys, 32, 8))


# ---------------------------------------------------------------------- the library's other ways
def forward_call(case: Case, x: Inputs) -> Call:
    """``forward`` with an Ampere configuration. UnavailableError: not a problem for it."""
    _check_whole_tiles(case)
    from flash_attention import forward

    return lambda: forward(AMPERE, x.q, x.k, x.v)


def ampere_call(case: Case, x: Inputs) -> Call:
    """``attention`` with the same configuration."""
    _check_whole_tiles(case)
    from flash_attention import attention

    return lambda: attention(x.q, x.k, x.v, causal=case.causal, config=AMPERE)


def _check_whole_tiles(case: Case) -> None:
    if case.feature != "dense" or case.causal:
        raise UnavailableError("timed on the plain dense problem only")


OWN = (Contestant("forward", forward_call), Contestant("attention, Ampere", ampere_call))


def measure(
    wanted: TimedCase, device: torch.device, contestants: Sequence[Contestant], rounds: int
) -> CallRow:
    """Checks and times one row.

    Args:
        wanted: what.
        device: where; on the CPU both times are the call's.
        contestants: who, beside the library's other ways where host times are wanted.
        rounds: measurements of each.

    Raises:
        DeviceLostError: a kernel broke the CUDA context.
    """
    mode = wanted.mode if MODES[wanted.mode][0] in timer_for(device).modes else "call"
    own = OWN if wanted.mode == "host" and wanted.case.direction == FORWARD else ()
    everyone = (*contestants, *own)
    return CallRow(wanted.mode, measure_case(wanted.case, mode, everyone, device, rounds))


# ---------------------------------------------------------------------- output
def host_table(rows: Sequence[CaseRow]) -> Table:
    """A line a contestant of each problem: its host time, also as a part of another's."""
    table = Table("host time of", "by", "us", f"/ {COMPARED_WITH}")
    for row in rows:
        for name, one in row.measured.items():
            if (timing := row.milliseconds.get(name)) is not None:
                ratio = row.over(name, COMPARED_WITH)
                shown = "-" if ratio is None else f"{ratio:.2f}"
                table.add_row(row.case.label(), name, f"{1e3 * timing.median:.2f}", shown)
            elif one.status in ("wrong", "failed"):
                table.add_row(row.case.label(), name, one.status, "-")
    return table


def call_table(rows: Sequence[CaseRow]) -> Table:
    """A line a problem: ours, and the others' time over ours; above 1, ours is ahead."""
    names = names_to_show(rows, CONTESTANTS)
    table = Table("call time of", "ours, us", *(f"{name} / ours" for name in names), "kernel")
    for row in rows:
        own, one = row.milliseconds.get(OURS), row.measured.get(OURS)
        shown = f"{1e3 * own.median:.1f}" if own else one.status if one else "not measured"
        table.add_row(row.case.label(), shown, *(row.cell(name) for name in names), row.kernel)
    return table


def run(
    path: Path,
    device: torch.device,
    seconds: float,
    contestants: Sequence[Contestant],
    rounds: int = ROUNDS,
    scale: int = 1,
) -> list[CallRow]:
    """Measures, saving after each row, until the time is over; prints the tables.

    Args:
        path: the JSON file.
        device: where.
        seconds: no row begins later.
        contestants: who, beside the library's other ways.
        rounds: measurements of each.
        scale: divides all lengths.
    """
    begin, rows = time.monotonic(), list[CallRow]()
    cases = list(dict.fromkeys(TimedCase(c.mode, c.case.scaled(scale)) for c in all_cases()))
    skipped = list[str]()
    facts: dict[str, Any] = {"skipped": skipped}
    file = ResultFile(BENCHMARK, WHAT, environment=environment(device), facts=facts)
    facts["build_seconds"] = build_ahead([wanted.case for wanted in cases], device)
    console = console_for()
    try:
        for wanted in cases:
            if time.monotonic() - begin > seconds:
                skipped.append(f"{wanted.mode}: {wanted.case.label()}")
                continue
            rows.append(measure(wanted, device, contestants, rounds))
            file.rows += rows[-1].outcome.to_rows()
            file.save(path)
    except DeviceLostError as lost:
        facts["stopped"] = f"{lost}. The CUDA context is lost: the rest is not measured"
        console.print(facts["stopped"], style="red", markup=False)
    file.save(path)
    console.print(host_table([row.outcome for row in rows if row.wanted == "host"]))
    console.print(call_table([row.outcome for row in rows if row.wanted == "call"]))
    for text in sorted({text for row in rows for text in row.outcome.remarks()}):
        console.print(text, markup=False)
    card = file.environment
    console.print(
        f"{card['gpu']}, torch {card['torch']}, {DTYPE.name.lower()}, {len(rows)} rows, "
        f"{len(skipped)} skipped, {time.monotonic() - begin:.0f} s; {path}"
    )
    return rows


def main(
    json: Annotated[Path, typer.Option(help="result file")] = Path("benchmarks/results/call-time.json"),
    seconds: Annotated[float, typer.Option(help="no row begins after this")] = 120.0,
    contestants: Annotated[str, typer.Option(help="names joined by commas")] = ALL_CONTESTANTS,
    rounds: Annotated[int, typer.Option(min=1, help="measurements of each")] = ROUNDS,
    scale: Annotated[int, typer.Option(min=0, help=SCALE_HELP)] = 0,
) -> None:
    """Host time and call time, on the device that is there."""
    with shown_errors():
        chosen = select_contestants(contestants)
        check_file(json)
        device = default_device()
        run(json, device, seconds, chosen, rounds, scale_on(device, scale))
        end_with(ResultFile.load(json))


if __name__ == "__main__":
    run_alone(main)
