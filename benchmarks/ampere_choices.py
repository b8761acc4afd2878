"""Times the Ampere family's choices beside FlashAttention-2.

    python benchmarks/ampere_choices.py --json benchmarks/results/h100-ampere.json

Each cell (type, head size, mask, length; 16,384 tokens, hidden size 2,048) runs the kernel that
``choose_ampere_kernel`` picks for it. All kernels are compiled first, in parallel; what is wrong is not
timed; kernel and peer are measured in random order in one process. The last lines are geometric means and
worst cells.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated

import torch
import typer

from flash_helpers.benchmark.ending import end_with
from flash_helpers.benchmark.peers import select_peers
from flash_helpers.benchmark.plan import Plan
from flash_helpers.benchmark.results import Results
from flash_helpers.benchmark.runner import bench, named_device
from flash_helpers.build import build_kernels
from flash_helpers.console.alone import run_alone
from flash_helpers.console.errors import shown_errors
from flash_helpers.kernel_configs import DType, ForwardKernel, choose_ampere_kernel
from flash_helpers.problem import Problem, grid

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_SIZES = (64, 128, 256)


def kernel_of(problem: Problem, capability: tuple[int, int]) -> ForwardKernel:
    """The choice for a problem on a GPU, where no LSE is asked for."""
    return choose_ampere_kernel(
        problem.dtype, problem.d_head, problem.causal, problem.seq_len, capability
    )[0]  # fmt: skip


def ratio_of(results: Results, problem: Problem, mode: str) -> float | None:
    """The kernel's TFLOP/s over FlashAttention-2's."""
    rates = {row.kind: row.tflops(mode) for row in results.rows if row.problem == problem}
    ours, theirs = rates.get("kernel"), rates.get("peer")
    return ours / theirs if ours and theirs else None


@shown_errors()
def main(
    json: Annotated[Path, typer.Option(help="result file")],
    dtypes: Annotated[str, typer.Option(help="names joined by commas")] = "bf16,fp16",
    rounds: Annotated[int, typer.Option(help="measurements of each kernel")] = 9,
    mode: Annotated[str, typer.Option(help="timing: hot, paused, cold, graph or call")] = "hot",
    seconds: Annotated[float, typer.Option(help="no cell starts after this")] = 600.0,
) -> None:
    """Times the Ampere family's choices beside FlashAttention-2."""
    start = time.monotonic()
    device = named_device("cuda:0")
    capability = torch.cuda.get_device_capability(device)
    types = [DType.from_string(name) for name in dtypes.split(",")]
    problems = grid(types, LENGTHS, HEAD_SIZES, (False, True), 0, 0)
    kernels = {problem: kernel_of(problem, capability) for problem in problems}
    build_kernels(sorted(set(kernels.values())), [10 * capability[0] + capability[1]])
    typer.echo(f"{len(set(kernels.values()))} kernels are built, {time.monotonic() - start:.0f} s")
    results, ratios = Results(benchmark="ampere_choices"), dict[Problem, float]()
    for problem, kernel in kernels.items():
        if time.monotonic() - start > seconds:
            typer.echo(f"time is over; left out: {problem.label()} and what follows")
            break
        bench(
            [problem], [kernel.config], select_peers("fa2"), device=device,
            plan=Plan(rounds, (mode,)), results=results,
        )  # fmt: skip
        results.save(json)
        found = ratio_of(results, problem, mode)
        typer.echo(f"{problem.label()}: {f'{found:.3f}' if found else 'not timed'}  {kernel.short_form()}")
        if found:
            ratios[problem] = found
    for dtype in types:
        of_type = {p: ratio for p, ratio in ratios.items() if p.dtype == dtype}
        if of_type:
            worst = min(of_type, key=lambda p: of_type[p])
            typer.echo(
                f"{dtype.name} over FlashAttention-2, {len(of_type)} cells: geometric mean "
                f"{geometric_mean(of_type.values()):.3f}, worst {of_type[worst]:.3f} ({worst.label()})"
            )
    end_with(results.file())


if __name__ == "__main__":
    run_alone(main)
