"""What a call costs beside its kernel: ``python -m flash_helpers.benchmark.call_time --json FILE``.

Two tables, all contestants of a row timed in turns, in random order, in one process:

host   how long Python is busy with one call of a tiny problem, for which no queue fills up: ``forward``, and
       ``attention`` with an Ampere kernel and with the library's choice; one query over a cache, whose keys
       are split; packed sequences.
call   wall time of a call of up to 1024 keys, or of one query over a cache: host and GPU, with one wait for a
       batch of calls.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flash_helpers.benchmark.environment import environment
from flash_helpers.benchmark.features import (
    ALL_CONTESTANTS,
    CONTESTANTS,
    DTYPE,
    Call,
    Case,
    Contestant,
    Inputs,
    difference,
    make_inputs,
)
from flash_helpers.benchmark.runner import default_device
from flash_helpers.benchmark.timing import TimedCall, Timing, alternate, timer_for
from flash_helpers.kernel_configs import DType, get_kernel_progression_configs

ROUNDS = 31
REFERENCE = "fa2"  # what host times are compared with
AMPERE = replace(get_kernel_progression_configs()[-1], dtype=DType.BF16)


@dataclass(frozen=True)
class TimedCase:
    """A problem, and which time of it is wanted: ``host`` or ``call``."""

    mode: str
    case: Case


def all_cases() -> Iterator[TimedCase]:
    """Every row: host times, then call times by length and for one query."""
    yield TimedCase("host", Case("dense", 1, 128, 128, 8, 8))
    yield TimedCase("host", Case("decode", 1, 1, 4096, 32, 8))
    yield TimedCase("host", Case("variable length", 2, 64, 64, 8, 8, lengths=(64, 64)))
    for causal in (False, True):
        for seq_len in (64, 128, 256, 512, 1024):
            yield TimedCase("call", Case("dense", 1, seq_len, seq_len, 16, 16, causal=causal))
    for batch in (1, 8):
        for keys in (1024, 4096, 16384):
            yield TimedCase("call", Case("decode", batch, 1, keys, 32, 8))


# ---------------------------------------------------------------------- contestants
def forward_call(case: Case, x: Inputs) -> Call:
    """``forward`` with an Ampere configuration. NotImplementedError: not a problem for it."""
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
        raise NotImplementedError("timed on the plain dense problem only")


OWN = (Contestant("forward", forward_call), Contestant("attention, Ampere", ampere_call))


# ---------------------------------------------------------------------- measuring
@dataclass
class CallRow:
    """The times of one case.

    Attributes:
        timed: what was timed.
        milliseconds: by contestant, a call; ``ours`` is ``attention`` with the library's choice.
        missing: why others have no time.
        kernel: what the library chose.
    """

    timed: TimedCase
    milliseconds: dict[str, Timing] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    kernel: str = ""

    def over(self, name: str, other: str) -> float | None:
        """Time of one contestant by that of another."""
        mine, theirs = self.milliseconds.get(name), self.milliseconds.get(other)
        return mine.median / theirs.median if mine and theirs else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the ratios to each other contestant of ``ours``."""
        times = {name: timing.to_json() for name, timing in self.milliseconds.items()}
        ratios = {name: self.over("ours", name) for name in self.milliseconds if name != "ours"}
        label = self.timed.case.label()
        return {**asdict(self), "label": label, "milliseconds": times, "ours_over": ratios}


def measure(timed_case: TimedCase, device: torch.device, names: Sequence[str], rounds: int) -> CallRow:
    """Times all who can compute the case and agree with the library's result.

    Args:
        timed_case: what.
        device: where; on the CPU both times are the call's.
        names: of the contestants beside the library's own.
        rounds: measurements of each.
    """
    import flash_attention

    case, row, timer = timed_case.case, CallRow(timed_case), timer_for(device)
    x = make_inputs(case, device)
    calls: dict[str, TimedCall] = {}
    result: Tensor | None = None
    contestants = [c for c in CONTESTANTS if c.name in (*names, "ours")]
    for contestant in (*contestants, *(OWN if timed_case.mode == "host" else ())):
        try:
            timed = TimedCall(contestant.bind(case, x), contestant.context)
            with timed.context():
                out = timed.call()
            if contestant.name == "ours":
                result, kernel = out, flash_attention.last_kernel()
                row.kernel = kernel.short_form() if kernel is not None else ""
            elif result is not None and (wrong := difference(out, result)):
                raise ValueError(wrong)
            timer.estimate(timed)
            calls[contestant.name] = timed
        except Exception as error:
            row.missing[contestant.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    mode = timed_case.mode if timed_case.mode in timer.modes else "call"
    samples, failures = alternate(calls, timer.measure(mode), rounds)
    row.missing |= {name: str(error) for name, error in failures.items()}
    row.milliseconds = {name: Timing.of(values) for name, values in samples.items()}
    return row


# ---------------------------------------------------------------------- output
def host_table(rows: Sequence[CallRow]) -> Table:
    """A line a contestant of each problem: its host time, also as a part of the reference's."""
    table = Table("host time of", "by", "us", f"/ {REFERENCE}")
    for row in rows:
        for name, timing in row.milliseconds.items():
            ratio = row.over(name, REFERENCE)
            shown = "-" if ratio is None else f"{ratio:.2f}"
            table.add_row(row.timed.case.label(), name, f"{1e3 * timing.median:.2f}", shown)
    return table


def call_table(rows: Sequence[CallRow]) -> Table:
    """A line a problem: ours, and the others' time over ours; above 1, ours is ahead."""
    names = [c.name for c in CONTESTANTS if c.name != "ours" and any(c.name in r.milliseconds for r in rows)]
    table = Table("call time of", "ours, us", *(f"{name} / ours" for name in names), "kernel")
    for row in rows:
        own = row.milliseconds.get("ours")
        if own is None:
            table.add_row(row.timed.case.label(), row.missing.get("ours", "not measured"))
            continue
        ratios = [row.over(name, "ours") for name in names]
        shown = ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        table.add_row(row.timed.case.label(), f"{1e3 * own.median:.1f}", *shown, row.kernel)
    return table


def run(
    path: Path, device: torch.device, seconds: float, names: Sequence[str], rounds: int = ROUNDS
) -> list[CallRow]:
    """Measures, saving after each row, until the time is over; prints the tables.

    Args:
        path: the JSON file.
        device: where.
        seconds: no row begins later.
        names: of contestants beside the library's own.
        rounds: measurements of each.
    """
    begin, rows = time.monotonic(), []
    document: dict[str, Any] = {"environment": environment(device), "rows": [], "skipped": []}
    path.parent.mkdir(parents=True, exist_ok=True)
    for timed_case in all_cases():
        if time.monotonic() - begin > seconds:
            document["skipped"].append(f"{timed_case.mode}: {timed_case.case.label()}")
            continue
        rows.append(measure(timed_case, device, names, rounds))
        document["rows"].append(rows[-1].to_json())
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console = Console(width=None if os.isatty(1) else 200)
    console.print(host_table([row for row in rows if row.timed.mode == "host"]))
    console.print(call_table([row for row in rows if row.timed.mode == "call"]))
    missing = {f"{name}: {text}" for row in rows for name, text in row.missing.items()}
    for text in sorted(missing):
        console.print(f"missing  {text}", highlight=False, markup=False)
    facts = document["environment"]
    console.print(
        f"{facts['gpu']}, torch {facts['torch']}, {str(DTYPE).removeprefix('torch.')}, {len(rows)} rows, "
        f"{len(document['skipped'])} skipped, {time.monotonic() - begin:.0f} s; {path}",
        highlight=False,
    )
    return rows


def main(
    json: Annotated[Path, typer.Option(help="result file")] = Path("benchmarks/results/call-time.json"),
    seconds: Annotated[float, typer.Option(help="no row begins after this")] = 120.0,
    contestants: Annotated[str, typer.Option(help="names joined by commas")] = ALL_CONTESTANTS,
    rounds: Annotated[int, typer.Option(help="measurements of each")] = ROUNDS,
) -> None:
    """Host time and call time, on the device that is there."""
    names, known = contestants.split(","), [c.name for c in CONTESTANTS]
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    run(json, default_device(), seconds, names, rounds)


if __name__ == "__main__":
    typer.run(main)
