"""What ``flash-attention tune`` does.

Arguments are checked before torch is imported, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flash_helpers.benchmark.plan import check_device_name
from flash_helpers.benchmark.table import shown_rate
from flash_helpers.commands.build import compiled_only
from flash_helpers.console.output import console_for, error_console, write_json
from flash_helpers.console.progress import shown_progress
from flash_helpers.console.writable import check_file, check_folder
from flash_helpers.kernel_selection import CAUSAL, select_configs
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.problem import FORWARD
from flash_helpers.problem import grid
from flash_helpers.results.bucket import Bucket
from flash_helpers.results.tables import export_table
from flash_helpers.tune.outcome import TunedProblem, Watcher
from flash_helpers.tune.space import tuning_space


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
    export: Path | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
    direction: str = FORWARD,
    *,
    keys: Sequence[int] = (),
) -> list[TunedProblem]:
    """Tunes a grid, prints the best of each bucket. An interruption keeps what is measured.

    Args:
        seq_lens, d_heads: of the grid.
        dtypes: names joined by commas.
        causal: ``no``, ``yes`` or ``both``.
        batch, heads: 0: chosen so that every size is the same amount of work.
        kernels: ``tune``: the tuning spaces of all families; or as in ``select_configs``.
        budget: seconds; 0: measure nothing, show what is known.
        jobs: compilations at the same time.
        fresh: measure again what the database knows.
        device: a CUDA device.
        export: write the table of this card there, see ``export_table``.
        json_path: write the outcome there.
        keys: numbers of keys, each with each of ``seq_lens`` queries; empty: as many keys as queries.
        direction: ``forward``, or ``backward``: kernels that compute gradients.

    Raises:
        ValueError: an argument that names nothing; the message says what is valid.
        NotWritableError: ``json_path`` or ``export`` can't be written.
        TableError: nothing was measured that ``export`` could write.
        flash_attention.errors.NoCudaDeviceError: no GPU.
        DeviceLostError: a kernel broke the CUDA context; what was measured before it is kept and shown.
        KeyboardInterrupt: likewise.
    """
    if causal not in CAUSAL:
        raise ValueError(f"causal is {causal!r}; valid: {', '.join(CAUSAL)}")
    if budget is not None and not budget >= 0:
        raise ValueError(f"budget is {budget:g}; it must be a number of seconds, or 0 to measure nothing")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs is {jobs}; allowed: a number of compilations from 1 on")
    check_file(json_path)
    if export is not None:
        check_folder(export if export.is_dir() else export.parent, "--export")
    console = console or console_for(json_path)
    names = [DType.from_string(name) for name in dtypes.split(",")]
    problems = grid(
        names, seq_lens, d_heads, CAUSAL[causal], batch, heads, direction=direction, seq_lens_k=keys
    )
    configs = tuning_space() if kernels == "tune" else select_configs(kernels)
    check_device_name(device)

    from flash_helpers.benchmark.measuring import DeviceLostError
    from flash_helpers.benchmark.runner import named_device
    from flash_helpers.tune.tuner import tune

    where = named_device(device)
    seen: dict[Bucket, TunedProblem] = {}
    stopped: KeyboardInterrupt | DeviceLostError | None = None
    with _watched(len(problems), seen) as watcher:
        try:
            tune(
                problems,
                device=where,
                configs=configs,
                budget=budget,
                jobs=jobs,
                fresh=fresh,
                watcher=watcher,
            )
        except (KeyboardInterrupt, DeviceLostError) as error:
            stopped = error
    outcomes = list(seen.values())
    note = _note(stopped, outcomes)
    if outcomes:
        console.print(tuned_table(outcomes))
    if note:
        console.print(note, style="yellow", markup=False)
    write_json(json_path, {"stopped": note, "buckets": [_to_json(tuned) for tuned in outcomes]})
    if stopped is not None:
        raise stopped
    if export is not None:
        from flash_attention.backends.cuda import device_facts_of

        console.print(f"table: {export_table(device_facts_of(where), export)}", markup=False, soft_wrap=True)
    return outcomes


def _note(stopped: BaseException | None, outcomes: Sequence[TunedProblem]) -> str:
    """What the reader should know besides the table."""
    if isinstance(stopped, KeyboardInterrupt):
        return "interrupted: what is measured is kept, and the same command goes on from there"
    if stopped is not None:
        return "a kernel broke the CUDA context. It is left out from now on: run the same command again"
    if any(tuned.state in ("skipped", "partly") for tuned in outcomes):
        return "the budget is spent: the same command goes on from here"
    return ""


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
def _watched(n_buckets: int, seen: dict[Bucket, TunedProblem]) -> Iterator[Watcher]:
    """A watcher that shows progress on standard error, and keeps what each bucket has come to."""
    with shown_progress(error_console()) as show:
        passes = {"screening": 0, "ranking": 0}

        def on_pass(name: str, tuned: TunedProblem) -> None:
            seen[tuned.bucket] = tuned
            passes[name] += 1
            best = f"{tuned.best.tflops:.1f} TFLOP/s, {tuned.best.kernel}" if tuned.best else tuned.reason
            show(name, passes[name], n_buckets, f"{tuned.bucket.label()}: {best}")

        yield Watcher(
            compiled_only(show),
            on_screened=lambda tuned: on_pass("screening", tuned),
            on_end=lambda tuned: on_pass("ranking", tuned),
        )


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
