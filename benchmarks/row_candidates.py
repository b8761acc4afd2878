"""Times configurations for rows of the grid in which a peer was ahead, beside the choice and the peers.

    python benchmarks/row_candidates.py --json benchmarks/results/h200-row-candidates.json
    python benchmarks/row_candidates.py --only "few keys,soft cap" --rounds 9 --json few.json
    python benchmarks/row_candidates.py --build-only
    python benchmarks/row_candidates.py --plan benchmarks/short_sequences.txt --json short.json

The plan, ``row_candidates.txt``, names rows of the grid, one a line, then kernels for them by their short
forms. ``row …, scores x 8`` is the row with queries eight times as large. Where items differ in length,
blocks take them from a counter (``dynamic``), whether or not the short form says so. All kernels are built
first, in parallel; one that spills or that the compiler serialises is left out. Each output is compared with
a float32 reference, and what is wrong is not timed. Contestants of a row are measured in turns in one
process.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from flash_helpers.benchmark.beginnings import beginnings
from flash_helpers.benchmark.build_ahead import build_ahead
from flash_helpers.benchmark.case_row import PEERS, CaseRow
from flash_helpers.benchmark.cases import Case, Inputs, expected_output, make_inputs
from flash_helpers.benchmark.contestants import (
    ALL_CONTESTANTS,
    OURS,
    Call,
    Contestant,
    own_call,
    select_contestants,
)
from flash_helpers.benchmark.ending import end_with
from flash_helpers.benchmark.environment import environment
from flash_helpers.benchmark.grid_cases import grid_cases
from flash_helpers.benchmark.implementations import UnavailableError, last_kernel_name
from flash_helpers.benchmark.measuring import measure_checked
from flash_helpers.benchmark.plan import Plan
from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.benchmark.runner import named_device
from flash_helpers.benchmark.timers import timer_for
from flash_helpers.console.alone import run_alone
from flash_helpers.console.errors import shown_errors
from flash_helpers.kernels.kernel import Kernel, KernelConfig
from flash_helpers.kernels.parsing import parse_kernel_name_into_config
from flash_helpers.select.candidates import kernel_for, unable_reason

TARGET = 90
PLAN = Path(__file__).with_suffix(".txt")
WHAT = "configurations for rows of the grid in which a peer was ahead, beside the choice and the peers"
MODE, ROW_SECONDS = "hot", 4.0
SHOWN = 6  # candidates of a row, the fastest
STAGE = "screening"
ROW = re.compile(r"row (?P<name>.+?)(?:, scores x (?P<factor>\d+))?")


@dataclass
class CandidateRow:
    """A row of the grid, and who may take part in it.

    Attributes:
        case: what is computed; of larger scores the feature says so.
        factor: of the queries.
        configs: the candidates.
    """

    case: Case
    factor: int = 1
    configs: list[KernelConfig] = field(default_factory=list)

    def add(self, config: KernelConfig) -> None:
        """One more candidate."""
        uneven = bool(self.case.lengths) or (self.case.causal and self.case.seq_q > config.B_r)
        if uneven and hasattr(config, "dynamic_schedule"):
            config = replace(config, dynamic_schedule=True)
        if config not in self.configs:
            self.configs.append(config)

    def inputs(self, device: torch.device) -> Inputs:
        """Those of the case, with larger queries."""
        x = make_inputs(self.case, device)
        x.q.mul_(self.factor)
        return x

    def kernels(self) -> list[Kernel]:
        """The candidates, compiled for the case.

        Raises:
            ValueError: one that can't compute it, with the reason.
        """
        for config in self.configs:
            if reason := unable_reason(config, self.case.problem(), [config]):
                raise ValueError(f"{self.case.label()}: {config.short_form()}: {reason}")
        return [kernel_for(config, self.case.problem()) for config in self.configs]


def named_case(case: Case) -> str:
    """The name of a row of the grid."""
    return f"{case.feature} {case.label()}"


def read_plan(path: Path) -> list[CandidateRow]:
    """The rows of a plan file. ``#`` starts a comment.

    Raises:
        ValueError: a line that is neither a row of the grid nor a kernel.
    """
    known = {named_case(case): case for case in grid_cases()}
    rows: list[CandidateRow] = []
    together: list[CandidateRow] = []  # rows that share what follows
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if match := ROW.fullmatch(text):
            if (case := known.get(match["name"])) is None:
                raise ValueError(
                    f"{path}:{number}: no row {match['name']!r} in the grid; {_like(text, known)}"
                )
            factor = int(match["factor"] or 1)
            feature = case.feature + (f", scores x {factor}" if factor > 1 else "")
            if together and together[-1].configs:
                together = []
            together.append(CandidateRow(replace(case, feature=feature), factor))
            rows.append(together[-1])
        elif not rows:
            raise ValueError(f"{path}:{number}: {text!r} comes before the first row; begin with 'row NAME'")
        else:
            for row in together:
                row.add(parse_kernel_name_into_config(text))
    return rows


def _like(text: str, known: dict[str, Case]) -> str:
    feature = text.split()[1]
    return "of this feature there are: " + "; ".join(n for n in known if n.startswith(feature)) + "."


def candidate(config: KernelConfig) -> Contestant:
    """The library with exactly this configuration."""

    def bind(case: Case, x: Inputs) -> Call:
        return own_call(case, x, config=config)

    return Contestant(config.short_form(), bind, ran=last_kernel_name)


def without(contestant: Contestant, reason: str) -> Contestant:
    """The contestant that says why it takes no part."""

    def bind(case: Case, x: Inputs) -> Call:
        raise UnavailableError(reason)

    return replace(contestant, bind=bind)


def build(rows: Sequence[CandidateRow], jobs: int, spilled: bool) -> dict[Kernel, str]:
    """Builds all candidates; of those that are left out, why. ``spilled``: not because they spill."""
    from flash_helpers.build import build_kernels

    bad, start = {}, time.perf_counter()
    kernels = list(dict.fromkeys(kernel for row in rows for kernel in row.kernels()))
    for built in (k for result in build_kernels(kernels, [TARGET], jobs) for k in result.kernels):
        if built.warnings:
            bad[built.kernel] = built.warnings[0]
        elif built.spill_bytes and not spilled:
            bad[built.kernel] = f"{built.spill_bytes} bytes spilled"
        if built.kernel in bad:
            print(f"left out  {built.kernel.short_form()}: {bad[built.kernel]}")
    print(f"{len(kernels)} kernels built in {time.perf_counter() - start:.0f} s", flush=True)
    return bad


def measure(
    row: CandidateRow,
    contestants: Sequence[Contestant],
    bad: dict[Kernel, str],
    device: torch.device,
    rounds: int,
) -> CaseRow:
    """Times one row."""
    taking_part = list(contestants)
    for config, kernel in zip(row.configs, row.kernels(), strict=True):
        one = candidate(config)
        taking_part.append(without(one, bad[kernel]) if kernel in bad else one)
    x = row.inputs(device)
    measured = measure_checked(
        {one.name: partial(one.prepare, row.case, x) for one in taking_part},
        lambda: expected_output(row.case, x),
        row.case.dtype,
        device,
        timer_for(device),
        Plan(rounds, (MODE,), seconds=ROW_SECONDS),
        row.case.label(),
    )
    return CaseRow(row.case, MODE, measured)


def show(row: CaseRow) -> None:
    """Our time and the peers', then the fastest candidates, each with the best peer's time over it."""
    us = {name: 1e3 * timing.median for name, timing in row.milliseconds.items()}
    best = min((us[name] for name in us if name in PEERS), default=None)

    def line(name: str) -> str:
        return f"{us[name]:8.1f} us" + (f" {best / us[name]:.3f}" if best else "")

    peers = " ".join(f"{name} {us[name]:.1f}" for name in us if name in PEERS)
    print(f"== {named_case(row.case)}: {line(OURS) if OURS in us else 'no time'} | {peers}")
    candidates = sorted((name for name in us if name not in PEERS | {OURS}), key=us.__getitem__)
    for name in candidates[:SHOWN]:
        print(f"   {line(name)} {name}")
    for remark in row.remarks():
        if "unavailable" not in remark:
            print(f"   ! {remark}")
    print(end="", flush=True)


def to_rows(row: CaseRow) -> list[dict[str, object]]:
    """Rows of the result file: a candidate is one of many, whose times decide what is chosen."""
    return [
        one if one["kind"] == "peer" or one["implementation"] == "attention" else one | {"stage": STAGE}
        for one in row.to_rows()
    ]


@shown_errors()
def main(
    json: Annotated[Path | None, typer.Option(help="result file, written after each row")] = None,
    plan: Annotated[Path, typer.Option(help="rows and kernels, see above")] = PLAN,
    only: Annotated[str, typer.Option(help="beginnings of rows' names, joined by commas; empty: all")] = "",
    contestants: Annotated[str, typer.Option(help="names joined by commas")] = ALL_CONTESTANTS,
    rounds: Annotated[int, typer.Option(min=1, help="measurements of each")] = 7,
    seconds: Annotated[float, typer.Option(help="no row begins after this")] = 240.0,
    jobs: Annotated[int, typer.Option(help="compilers at a time; 0: one a core")] = 0,
    spilled: Annotated[bool, typer.Option("--spilled", help="time kernels that spill, too")] = False,
    build_only: Annotated[bool, typer.Option(help="compile, and say what is left out")] = False,
) -> None:
    """Times configurations for rows of the grid in which a peer was ahead."""
    start = time.monotonic()
    device = named_device("cpu" if build_only else "cuda:0")
    rows = read_plan(plan)
    if wanted := beginnings(only, (named_case(row.case) for row in rows), "row"):
        rows = [row for row in rows if named_case(row.case).startswith(wanted)]
    chosen = select_contestants(contestants)
    bad = build(rows, jobs or os.cpu_count() or 1, spilled)
    if build_only:
        raise typer.Exit(1 if bad else 0)
    build_ahead([row.case for row in rows], device)
    file = ResultFile("row_candidates", WHAT, environment=environment(device))
    for row in rows:
        if time.monotonic() - start > seconds:
            print(f"{named_case(row.case)}: skipped, the {seconds:g} seconds are over")
            continue
        measured = measure(row, chosen, bad, device, rounds)
        file.rows += to_rows(measured)
        if json is not None:
            file.save(json)
        show(measured)
    print(f"done after {time.monotonic() - start:.0f} s")
    end_with(file)


if __name__ == "__main__":
    run_alone(main)
