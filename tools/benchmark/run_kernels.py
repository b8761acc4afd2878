#!/usr/bin/env python3
"""Times kernels of one size beside their peers: a thin command line over ``flash_helpers.benchmark``.

python tools/benchmark/run_kernels.py 4096 128 --kernels ladder --dtype fp16 --json out.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "py")]

from flash_helpers.benchmark.command import bench_command  # noqa: E402
from flash_helpers.benchmark.ending import end_with  # noqa: E402
from flash_helpers.cli import shown_errors  # noqa: E402
from flash_helpers.console.alone import run_alone  # noqa: E402


def main(
    seq_len: Annotated[int, typer.Argument(help="queries and keys")],
    d_head: Annotated[int, typer.Argument(help="head size")],
    ref: Annotated[bool, typer.Option("--ref/--no-ref", help="time the peers too")] = True,
    n_runs: Annotated[int, typer.Option("--n_runs", "--n-runs", help="measurements of each")] = 11,
    kernels: Annotated[
        str, typer.Option(help="all, ladder, tune, 'B_r,B_c', or short forms joined by ;")
    ] = "all",
    dtype: str = "fp16",
    causal: bool = False,
    batch: int = 16,
    heads: int = 16,
    json: Annotated[Path | None, typer.Option(help="write a result file")] = None,
) -> None:
    """Times kernels of one size beside their peers."""
    with shown_errors():
        results = bench_command(
            [seq_len], [d_head], dtype, "yes" if causal else "no", batch, heads, kernels,
            "default" if ref else "none", n_runs, json=json,
        )  # fmt: skip
        end_with(results.file())


if __name__ == "__main__":
    run_alone(main)
