"""The figures that a release is judged by, in one run of a few minutes on one GPU.

``python -m flash_helpers.benchmark.milestone --out DIR`` builds the kernels of head size 128, finds the
best configuration, times it beside its peers, walks the ladder, measures the host's part, and writes
``milestone.json``. A section that fails says so in its place; the others still run.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from flash_helpers.benchmark.ending import end_with
from flash_helpers.benchmark.host_time import SMALL, host_times
from flash_helpers.benchmark.implementations import KernelImplementation
from flash_helpers.benchmark.ladder import ladder_steps
from flash_helpers.benchmark.measuring import DeviceLostError
from flash_helpers.benchmark.peers import select_peers
from flash_helpers.benchmark.plan import Plan
from flash_helpers.benchmark.results import Results, Row
from flash_helpers.benchmark.runner import bench, default_device
from flash_helpers.benchmark.table import ratio_to_best_peer, results_table, shown_rate
from flash_helpers.benchmark.timing import Timing
from flash_helpers.console.alone import run_alone
from flash_helpers.console.errors import shown_errors
from flash_helpers.console.output import console_for
from flash_helpers.console.writable import check_folder
from flash_helpers.kernel_configs import (
    FlashForwardKernelConfig,
    ForwardKernel,
    get_kernel_progression_configs,
    get_kernels_to_build,
)
from flash_helpers.kernels.dtype import DType
from flash_helpers.problem import Problem

BATCH, HEADS, SEQ_LEN, D_HEAD = 16, 16, 4096, 128
SCREENING = Plan(rounds=3, modes=("hot",))
FINALISTS = 3  # configurations that meet the peers after the screening


@dataclass
class Milestone:
    """State shared by the sections.

    Attributes:
        device: where kernels run; results, notes and summary fill up while it runs.
        sizes: (batch, heads, seq_len).
        rounds: of the final comparisons.
        peers: names as in ``--peers``.
        summary: the lines of the last table: (figure, value).
        problems: what failed, one line each.
    """

    device: torch.device
    sizes: tuple[int, int, int] = (BATCH, HEADS, SEQ_LEN)
    rounds: int = 15
    peers: str = "default"
    jobs: int = 1
    build_all: bool = False
    results: Results = field(default_factory=lambda: Results(benchmark="milestone"))
    summary: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    best: dict[DType, FlashForwardKernelConfig] = field(default_factory=dict)

    def problem(self, dtype: DType) -> Problem:
        """The size of the headline comparison."""
        batch, heads, seq_len = self.sizes
        return Problem(dtype, batch, heads, seq_len, D_HEAD)


def build_section(m: Milestone) -> None:
    """Compiles every kernel of this head size (or all) at once and says how long it took."""
    if m.device.type != "cuda":
        return
    from flash_helpers.build import build_kernels

    configs = [c for c in get_kernels_to_build() if m.build_all or c.d_head == D_HEAD]
    major, minor = torch.cuda.get_device_capability(m.device)
    start = time.perf_counter()
    built = build_kernels([ForwardKernel(c) for c in configs], [10 * major + minor], jobs=m.jobs)
    seconds = time.perf_counter() - start
    kernels = [k for result in built for k in result.kernels]
    compiled = [k.seconds for k in kernels if not k.cached]
    spilling = [k.kernel.short_form() for k in kernels if k.spill_bytes]
    m.results.facts["build"] = {
        "seconds": seconds,
        "jobs": m.jobs,
        "kernels": [
            {
                "kernel": k.kernel.short_form(),
                "seconds": k.seconds,
                "registers": k.registers,
                "spill_bytes": k.spill_bytes,
                "cached": k.cached,
            }
            for k in kernels
        ],
    }
    m.summary.append((f"build: {len(compiled)} of {len(kernels)} kernels compiled", f"{seconds:.1f} s"))
    if compiled:
        slowest = f"{statistics.median(compiled):.1f} s, slowest {max(compiled):.1f} s, {m.jobs} at a time"
        m.summary.append(("build: one kernel, median", slowest))
    m.summary.append(("build: kernels that spill", f"{len(spilling)} of {len(kernels)}"))


def best_section(m: Milestone, dtype: DType) -> None:
    """Screens all configurations of one dtype, then times the best few beside the peers."""
    problem = m.problem(dtype)
    candidates = [c for c in get_kernels_to_build() if (c.dtype, c.d_head) == (dtype, D_HEAD)]
    screened = Results(matrix_tflops=m.results.matrix_tflops)
    bench([problem], candidates, device=m.device, plan=SCREENING, results=screened)
    ranked = sorted((r for r in screened.rows if r.timings), key=lambda r: r.timings["hot"].median)
    m.problems += _failures(screened.rows)
    m.results.screening += screened.rows
    if not ranked:
        raise RuntimeError(f"none of {len(candidates)} configurations ran correctly")
    by_name = {c.short_form(): c for c in candidates}
    finalists = [by_name[row.implementation] for row in ranked[:FINALISTS]]
    modes = ("hot", "paused", "cold", "call", "graph")
    peers = select_peers(m.peers)
    first = len(m.results.rows)
    bench([problem], finalists, peers, device=m.device, plan=Plan(m.rounds, modes), results=m.results)
    rows = m.results.rows[first:]
    best = min(
        (r for r in rows if r.kind == "kernel" and "hot" in r.timings), key=lambda r: r.timings["hot"].median
    )
    m.best[dtype] = by_name[best.implementation]
    m.summary.append((f"{problem.label()}: best configuration", best.implementation))
    m.summary.append((f"{problem.label()}: TFLOP/s hot", shown_rate(best.tflops("hot"))))
    for mode in ("hot", "paused"):
        m.summary.append((f"{problem.label()}: / fa2, {mode}", _ratio_to(best, rows, "fa2", mode)))
        ratio = ratio_to_best_peer(best, rows, mode)
        m.summary.append((f"{problem.label()}: / best peer, {mode}", f"{ratio:.3f}" if ratio else "no peer"))


def ladder_section(m: Milestone) -> None:
    """Times the steps of the ladder together, beside FlashAttention-2."""
    problem = m.problem(DType.FP16)
    configs = get_kernel_progression_configs()
    first = len(m.results.rows)
    bench([problem], configs, select_peers("fa2"), device=m.device, plan=Plan(m.rounds), results=m.results)
    steps = ladder_steps([config.short_form() for config in configs], m.results.rows[first:])
    for number, (config, step) in enumerate(zip(configs, steps, strict=True), start=1):
        ratio = f"{step.over_peer:.3f}" if step.over_peer else "not measured"
        text = f"{shown_rate(step.tflops)} TFLOP/s, / fa2 {ratio}" if step.tflops else step.reason
        text += f", / step before {step.over_step_before:.3f}" if step.over_step_before else ""
        m.summary.append((f"ladder {number}: {config.short_form(include_tup=False)}", text))
    m.results.facts["ladder"] = [step.to_json() for step in steps]


def host_section(m: Milestone) -> None:
    """Host time of one small call beside PyTorch's FlashAttention-2 on the same tensors."""
    config = m.best.get(SMALL.dtype) or get_kernel_progression_configs()[-1]
    mine = KernelImplementation.of(config, SMALL)
    times = host_times(
        [mine, *select_peers("fa2,cudnn" if m.device.type == "cuda" else "sdpa-cpu")], m.device
    )
    m.results.facts["host_milliseconds"] = {
        name: value.to_json() if isinstance(value, Timing) else value for name, value in times.items()
    }
    for name, value in times.items():
        shown = f"{value.median * 1e3:.2f} µs" if isinstance(value, Timing) else value
        m.summary.append((f"host time of a call: {'forward' if name == mine.name else name}", shown))
    own, fa2 = times.get(mine.name), times.get("fa2")
    if isinstance(own, Timing) and isinstance(fa2, Timing):
        m.summary.append(("host time: forward / fa2", f"{own.median / fa2.median:.3f}"))


def run(m: Milestone, out: Path, minutes: float, console: Console) -> Milestone:
    """Runs the sections in order, saving after each; prints the short table last."""
    path = out / "milestone.json"
    sections: list[tuple[str, Callable[[], None]]] = [
        ("build", lambda: build_section(m)),
        ("best configuration fp16", lambda: best_section(m, DType.FP16)),
        ("best configuration bf16", lambda: best_section(m, DType.BF16)),
        ("ladder", lambda: ladder_section(m)),
        ("host time", lambda: host_section(m)),
    ]
    start = time.monotonic()
    for name, section in sections:
        if time.monotonic() - start > 60 * minutes:
            m.problems.append(f"{name}: skipped, the {minutes:g} minutes are over (--minutes)")
            continue
        try:
            section()
        except DeviceLostError as error:
            m.problems.append(f"{name}: {error}. The CUDA context is lost: the rest is skipped")
            break
        except Exception as error:
            m.problems.append(f"{name}: {type(error).__name__}: {error}")
        finally:
            m.results.facts["summary"] = dict(m.summary)
            m.results.facts["problems"] = m.problems
            m.results.save(path)
        console.print(f"{name}: done after {time.monotonic() - start:.0f} s", highlight=False)
    if m.results.rows:
        console.print(results_table(m.results))
    for text in m.problems:
        console.print(f"problem  {text}", style="red", highlight=False, markup=False)
    table = Table("figure", "value", title=_card(m.results.rows), title_justify="left")
    for figure, value in m.summary:
        table.add_row(figure, value)
    console.print(table)
    console.print(f"written to {path}", highlight=False)
    return m


def _ratio_to(row: Row, rows: list[Row], name: str, mode: str) -> str:
    other = next((r for r in rows if r.implementation == name), None)
    mine, theirs = row.tflops(mode), other.tflops(mode) if other else None
    return f"{mine / theirs:.3f}" if mine and theirs else f"{name} not measured"


def _failures(rows: list[Row]) -> list[str]:
    """One line for each different reason, however many kernels share it."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.status != "ok":
            names.setdefault(f"{row.status}: {row.reason}", []).append(row.implementation)
    return [f"{len(found)} kernels, the first {found[0]}: {reason}" for reason, found in names.items()]


def _card(rows: list[Row]) -> str:
    if not rows:
        return "nothing was measured"
    facts = rows[0].environment
    names = ("gpu", "driver", "torch", "cuda", "cudnn", "git_commit")
    return "  ".join(f"{name} {facts.get(name)}" for name in names)


def main(
    out: Annotated[Path, typer.Option(help="folder of milestone.json")] = Path("benchmarks/results"),
    minutes: Annotated[float, typer.Option(help="no section starts after this")] = 4.0,
    rounds: Annotated[int, typer.Option(help="measurements of each implementation")] = 15,
    peers: Annotated[str, typer.Option(help="names joined by commas, all, default or none")] = "default",
    jobs: Annotated[int, typer.Option(help="compilers at a time; 0: one a core")] = 0,
    build_all: Annotated[bool, typer.Option(help="build the whole ahead-of-time set")] = False,
    batch: int = BATCH,
    heads: int = HEADS,
    seq_len: int = SEQ_LEN,
) -> None:
    """The figures that a release is judged by, on the device that is there."""
    console = console_for()
    jobs = jobs or os.cpu_count() or 1
    with shown_errors():
        check_folder(out, "--out")
        select_peers(peers)
        Plan(rounds)
        state = Milestone(default_device(), (batch, heads, seq_len), rounds, peers, jobs, build_all)
        for dtype in DType:
            state.problem(dtype)
        run(state, out, minutes, console)
    end_with(state.results.file())
    raise typer.Exit(0 if any(row.status == "ok" for row in state.results.rows) else 1)


if __name__ == "__main__":
    run_alone(main)
