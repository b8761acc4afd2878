"""``flash-attention ladder``: runs the steps of optimisation side by side and writes the report.

Arguments are checked before torch is imported, which takes seconds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flash_helpers.benchmark.ladder import Step, ladder_steps, ladder_table
from flash_helpers.benchmark.peers import select_peers
from flash_helpers.benchmark.plan import Plan, check_device_name
from flash_helpers.benchmark.results import Results, Row
from flash_helpers.build import build_kernels
from flash_helpers.commands.build import compile_progress
from flash_helpers.commands.targets import present_targets
from flash_helpers.console.output import console_for, error_console, write_json
from flash_helpers.console.progress import shown_progress
from flash_helpers.console.writable import check_file, check_folder
from flash_helpers.kernel_selection import CAUSAL
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.families import direction_of, family_of, kernel_of
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.ladder import Rung
from flash_helpers.kernels.ladders import LADDERS, get_ladder
from flash_helpers.problem import Problem, grid
from flash_helpers.report.command import write_report

RESULT_FILE = "ladder.json"
SEQ_LEN, CPU_SEQ_LEN = 4096, 256  # where none is given
GPU_WORK, CPU_WORK = (16384, 2048), (256, 512)  # batch · seq_len and heads · d_head where none are given
ON_CPU = (
    "no GPU is used: the CPU takes the kernels' steps in PyTorch, at small sizes unless others are given. "
    "Results are checked; the times say nothing of a GPU"
)


@dataclass(frozen=True)
class Climb:
    """One ladder and the problems that it is measured on.

    Attributes:
        family: of its kernels, and their direction where that is not ``forward``: ``ampere_backward``.
        rungs: its steps and their configurations.
        problems: they differ in length only.
    """

    family: str
    rungs: Sequence[Rung[Any]]
    problems: Sequence[Problem]

    @property
    def kernels(self) -> list[Kernel]:
        """The steps' kernels, in order."""
        causal = self.problems[0].causal
        return [kernel_of(rung.config, causal=causal) for rung in self.rungs]


def plan_climbs(
    family: str,
    dtype: str,
    d_heads: Sequence[int],
    seq_lens: Sequence[int],
    causal: str,
    batch: int = 0,
    heads: int = 0,
    work: tuple[int, int] = GPU_WORK,
) -> list[Climb]:
    """What there is to measure: one ladder a family, head size and mask.

    Args:
        work: batch · seq_len and heads · d_head where ``batch`` or ``heads`` is 0.
        family, dtype, d_heads, seq_lens, causal, batch, heads: see ``ladder_command``.

    Raises:
        ValueError: an argument that names nothing.
    """
    if causal not in CAUSAL:
        raise ValueError(f"causal is {causal!r}; valid: {', '.join(CAUSAL)}")
    if not d_heads or not seq_lens:
        raise ValueError("no head size or no length is given; give at least one of each")
    if family not in (*LADDERS, "all"):
        raise ValueError(f"there is no ladder {family!r}; valid: {', '.join(LADDERS)}, all")
    families = tuple(LADDERS) if family == "all" else (family,)
    wanted = DType.from_string(dtype)
    climbs = []
    for name, d_head, mask in itertools.product(families, d_heads, CAUSAL[causal]):
        rungs = get_ladder(name, wanted, d_head, mask)
        direction = direction_of(rungs[0].config).name
        problems = grid([wanted], seq_lens, [d_head], [mask], batch, heads, *work, direction=direction)
        climbs.append(Climb(name, rungs, problems))
    return climbs


def ladder_command(
    out: Path,
    family: str = "ampere",
    dtype: str = "bf16",
    d_heads: Sequence[int] = (128,),
    seq_lens: Sequence[int] | None = None,
    causal: str = "no",
    batch: int = 0,
    heads: int = 0,
    peers: str = "fa2,cudnn,sdpa-cpu",
    rounds: int = 11,
    device: str | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> list[Step]:
    """Builds and times the steps together, prints what each gained, and writes results and report.

    All kernels are compiled first, in parallel. Each step's output is compared with the reference before it
    is timed; then the steps of a ladder and the peers take turns in random order.

    Args:
        out: folder of ``ladder.json`` and of the report.
        family: ``ampere``, ``hopper``, ``ampere_backward`` …, or ``all``.
        dtype: name of the element type.
        d_heads: head sizes.
        seq_lens: lengths; None: 4096, on the CPU 256, which takes seconds there instead of minutes.
        causal: ``no``, ``yes`` or ``both``.
        batch, heads: 0: chosen so that batch · seq_len and heads · d_head are the same for every size: 16384
            and 2048, on the CPU 256 and 512.
        peers: see ``select_peers``.
        rounds: measurements of each.
        device: default: the GPU if there is one.
        json_path: write the steps there.

    Raises:
        ValueError: an argument that names nothing.
        NotWritableError: ``out`` or ``json_path`` can't be written.
        ModuleNotFoundError: no matplotlib. The results are written.
    """
    start = time.monotonic()
    check_file(json_path)
    check_folder(out, "--out")
    check_device_name(device)
    plan_climbs(family, dtype, d_heads, seq_lens or (SEQ_LEN,), causal, batch, heads)
    selected, plan = select_peers(peers), Plan(rounds, ("hot",))
    console = console or console_for(json_path)

    from flash_helpers.benchmark.runner import bench, named_device

    where = named_device(device)
    on_cpu = where.type == "cpu"
    if seq_lens is None:
        seq_lens = (CPU_SEQ_LEN if on_cpu else SEQ_LEN,)
    work = CPU_WORK if on_cpu else GPU_WORK
    climbs = plan_climbs(family, dtype, d_heads, seq_lens, causal, batch, heads, work)
    if on_cpu:
        console.print(ON_CPU, style="yellow", soft_wrap=True)
    else:
        seconds = _build(climbs)
        console.print(f"built after {seconds:.0f} s", highlight=False)
    results, steps = Results(benchmark="ladder"), list[Step]()
    path = out / RESULT_FILE
    n_rows = sum(len(climb.problems) * (len(climb.rungs) + len(selected)) for climb in climbs)
    with shown_progress(error_console()) as show:

        def on_row(row: Row) -> None:
            show("measured", len(results.rows), n_rows, f"{row.problem.label()} {row.implementation}")
            results.save(path)

        for climb in climbs:
            first = len(results.rows)
            bench(
                climb.problems, [rung.config for rung in climb.rungs], selected, device=where,
                plan=plan, on_row=on_row, results=results,
            )  # fmt: skip
            names = [kernel.short_form() for kernel in climb.kernels]
            for problem in climb.problems:
                rows = [row for row in results.rows[first:] if row.problem == problem]
                found = ladder_steps(names, rows)
                title = f"{climb.family}, {problem.label()} on {rows[0].environment.get('gpu')}"
                console.print(ladder_table(found, [rung.step.idea for rung in climb.rungs], title))
                steps += found
    write_json(json_path, [step.to_json() for step in steps])
    if any(step.tflops for step in steps):
        written = write_report([path], out)
        console.print(f"{path}, {written[0]}", markup=False, soft_wrap=True)
    console.print(f"done after {time.monotonic() - start:.0f} s", highlight=False)
    return steps


def _build(climbs: Sequence[Climb]) -> float:
    """Compiles every kernel for the GPUs that are here; seconds that it took."""
    start = time.monotonic()
    kernels = dict.fromkeys(kernel for climb in climbs for kernel in climb.kernels)
    with compile_progress(error_console()) as on_kernel:
        for target in present_targets():
            if here := [kernel for kernel in kernels if family_of(kernel).runs_on(target)]:
                build_kernels(here, [target], None, on_kernel)
    return time.monotonic() - start
