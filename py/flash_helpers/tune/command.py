"""What ``flash-attention tune`` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from flash_helpers.benchmark.runner import DeviceLostError
from flash_helpers.benchmark.table import shown_rate
from flash_helpers.build import CompiledKernel
from flash_helpers.commands.output import console_for, write_json
from flash_helpers.configs.dtype import DType
from flash_helpers.kernel_selection import CAUSAL, select_configs
from flash_helpers.problem import Problem, grid
from flash_helpers.tune.bucket import Bucket
from flash_helpers.tune.database import Measurement, TuningDatabase
from flash_helpers.tune.device import TunedDevice
from flash_helpers.tune.space import tuning_space
from flash_helpers.tune.tables import export_table
from flash_helpers.tune.tuner import TunedProblem, Watcher, tune


def tune_command(
    seq_lens: Sequence[int],
    d_heads: Sequence[int],
    dtypes: str = "fp16,bf16",
    causal: str = "both",
    batch: int = 0,
    heads: int = 0,
    kernels: str = "tune",
    budget: float | None = None,
    jobs: int | None = None,
    fresh: bool = False,
    device: str = "cuda",
    json_path: Path | None = None,
    console: Console | None = None,
) -> list[TunedProblem]:
    """Tunes a grid, prints the best of each bucket. An interruption keeps what is measured.

    Args:
        seq_lens, d_heads: of the grid.
        dtypes: names joined by commas.
        causal: ``no``, ``yes`` or ``both``.
        batch, heads: 0: chosen so that every size is the same amount of work.
        kernels: ``tune``: the tuning spaces of all families; or as in ``select_configs``.
        budget: seconds.
        jobs: compilations at the same time.
        fresh: measure again what the database knows.
        device: a CUDA device.
        json_path: write the outcome there.

    Raises:
        ValueError: an argument that names nothing; the message says what is valid.
        flash_attention.errors.NoCudaDeviceError: no GPU.
        DeviceLostError: a kernel broke the CUDA context; what was measured before it is kept.
    """
    import torch

    if causal not in CAUSAL:
        raise ValueError(f"causal is {causal!r}; valid: {', '.join(CAUSAL)}")
    if budget is not None and budget <= 0:
        raise ValueError(f"budget is {budget:g}; it must be a positive number of seconds")
    console = console or console_for(json_path)
    names = [DType.from_string(name) for name in dtypes.split(",")]
    problems = grid(names, seq_lens, d_heads, CAUSAL[causal], batch, heads)
    configs = tuning_space() if kernels == "tune" else select_configs(kernels)
    ended: list[TunedProblem] = []
    stopped = ""
    with _watched(problems, ended) as watcher:
        try:
            ended = tune(
                problems, device=torch.device(device), configs=configs, budget=budget, jobs=jobs, fresh=fresh,
                watcher=watcher,
            )  # fmt: skip
        except KeyboardInterrupt:
            stopped = "interrupted: what is measured is kept, and the same command goes on from there"
        except DeviceLostError as lost:
            stopped = f"{lost}. This kernel is left out from now on: run the same command again"
    if ended:
        console.print(tuned_table(ended))
    if stopped:
        console.print(stopped, style="yellow", markup=False)
    elif any(tuned.state in ("skipped", "partly") for tuned in ended):
        console.print("the budget is spent: the same command goes on from here", style="yellow")
    write_json(json_path, {"stopped": stopped, "buckets": [_to_json(tuned) for tuned in ended]})
    return ended


def export_command(path: Path | None = None, device: str = "cuda", console: Console | None = None) -> Path:
    """Writes the table of this machine's card; ``path`` None: its place in the package.

    Raises:
        TableError: nothing was measured.
        flash_attention.errors.NoCudaDeviceError: no GPU.
    """
    from flash_attention.backends.cuda import device_facts_of

    written = export_table(TunedDevice.of(device_facts_of(device)), path, TuningDatabase())
    (console or console_for(None)).print(str(written), markup=False)
    return written


def tuned_table(outcomes: Sequence[TunedProblem]) -> Table:
    """The best kernel of each bucket, and what became of the others."""
    table = Table("bucket")
    table.add_column("best kernel", overflow="fold")
    for title in ("TFLOP/s", "/ second", "measured", "wrong or\nfailed", "pruned", "state"):
        table.add_column(title, justify="right")
    for tuned in outcomes:
        timed = [m for m in tuned.results if m.milliseconds is not None]
        best = tuned.best
        second = timed[1].milliseconds if len(timed) > 1 else None
        lead = f"{second / best.milliseconds:.3f}" if best and best.milliseconds and second else ""
        table.add_row(
            tuned.bucket.label(),
            Text(best.kernel if best else tuned.reason),
            shown_rate(best.tflops) if best else "",
            lead,
            str(len(timed)),
            str(sum(m.status != "ok" for m in tuned.results)),
            str(len(tuned.pruned)),
            tuned.state,
        )
    return table


@contextmanager
def _watched(problems: Sequence[Problem], ended: list[TunedProblem]) -> Iterator[Watcher]:
    """A watcher that draws two progress bars on standard error, and keeps what has ended."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[last]}", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        compiling = progress.add_task("compiling", total=None, last="")
        measuring = progress.add_task("measuring", total=len(problems), last="")

        def on_kernel(compiled: CompiledKernel, done: int, total: int) -> None:
            progress.update(compiling, completed=done, total=total, last=compiled.kernel.short_form())

        def on_begin(bucket: Bucket, candidates: int) -> None:
            progress.update(measuring, last=f"{bucket.label()}: {candidates} kernels")

        def on_measured(bucket: Bucket, measured: Measurement) -> None:
            progress.update(measuring, last=f"{bucket.label()}: {measured.kernel}")

        def on_end(tuned: TunedProblem) -> None:
            ended.append(tuned)
            progress.advance(measuring)

        yield Watcher(on_kernel, on_begin, on_measured, on_end)


def _to_json(tuned: TunedProblem) -> dict[str, Any]:
    return {
        "bucket": tuned.bucket.to_json(),
        "problem": tuned.problem.to_json(),
        "state": tuned.state,
        "reason": tuned.reason,
        "results": [
            {
                "kernel": m.kernel,
                "status": m.status,
                "reason": m.reason,
                "stage": m.stage,
                "milliseconds": m.milliseconds,
                "tflops": m.tflops,
                "rounds": m.rounds,
                "error": m.error,
            }
            for m in tuned.results
        ],
        "pruned": [{"kernel": p.kernel.short_form(), "reason": p.reason} for p in tuned.pruned],
    }
