"""``flash-attention ladder``: runs the steps of optimisation side by side and writes the report."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from flash_helpers.benchmark.ladder import Step, ladder_steps, ladder_table
from flash_helpers.benchmark.peers import select_peers
from flash_helpers.benchmark.results import Results, Row
from flash_helpers.benchmark.runner import Plan, bench, named_device
from flash_helpers.build import build_kernels
from flash_helpers.build.families import family_of
from flash_helpers.commands.build import compile_progress
from flash_helpers.commands.output import console_for, write_json
from flash_helpers.commands.targets import present_targets
from flash_helpers.configs.kernel import ForwardConfig, ForwardKernel
from flash_helpers.configs.traits import ForwardTraits
from flash_helpers.kernel_configs import get_hopper_progression_configs, get_kernel_progression_configs
from flash_helpers.problem import Problem
from flash_helpers.report.command import write_report

LADDERS = ("ampere", "hopper")
RESULT_FILE = "ladder.json"


def ladder_configs(family: str) -> list[ForwardConfig]:
    """The steps of one family, in order.

    Raises:
        ValueError: no such ladder.
    """
    if family == "ampere":
        return list(get_kernel_progression_configs())
    if family == "hopper":
        return list(get_hopper_progression_configs())
    raise ValueError(f"there is no ladder {family!r}; valid: {', '.join(LADDERS)}")


def ladder_command(
    out: Path,
    family: str = "ampere",
    batch: int = 16,
    heads: int = 16,
    seq_len: int = 4096,
    causal: bool = False,
    peers: str = "default",
    rounds: int = 11,
    device: str | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> list[Step]:
    """Builds and times the steps together, prints what each gained, and writes results and report.

    Args:
        out: folder of ``ladder.json`` and of the report.
        family: ``ampere`` (fp16) or ``hopper`` (bf16).
        batch, heads, seq_len, causal: the problem; d_head is 128.
        peers: see ``select_peers``.
        rounds: measurements of each.
        device: default: the GPU if there is one.
        json_path: write the steps there.

    Raises:
        ValueError: an argument that names nothing.
        ModuleNotFoundError: no matplotlib. The results are written.
    """
    console = console or console_for(json_path)
    configs = ladder_configs(family)
    problem = Problem(configs[0].dtype, batch, heads, seq_len, configs[0].d_head, causal)
    where = named_device(device)
    if where.type == "cuda":
        kernels = [ForwardKernel(config, ForwardTraits(causal=causal)) for config in configs]
        targets = [t for t in present_targets() if family_of(kernels[0]).runs_on(t)]
        with compile_progress(Console(stderr=True)) as on_kernel:
            build_kernels(kernels, targets or present_targets(), None, on_kernel)
    results = Results()
    path = out / RESULT_FILE
    with Progress(console=Console(stderr=True), transient=True) as progress:
        progress.add_task(f"measuring {problem.label()}", total=None)

        def on_row(row: Row) -> None:
            results.save(path)

        bench(
            [problem], configs, select_peers(peers), device=where, plan=Plan(rounds, ("hot",)), on_row=on_row,
            results=results,
        )  # fmt: skip
    names = [ForwardKernel(config, ForwardTraits(causal=causal)).short_form() for config in configs]
    steps = ladder_steps(names, results.rows)
    gpu = results.rows[0].environment.get("gpu") if results.rows else ""
    console.print(ladder_table(steps, f"{problem.label()} on {gpu}"))
    write_json(json_path, [step.to_json() for step in steps])
    if any(step.tflops for step in steps):
        written = write_report([path], out)
        console.print(f"{path}, {written[0]}", markup=False)
    return steps
