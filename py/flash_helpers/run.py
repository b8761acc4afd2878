"""The first look: ``attention()`` on the device that is there, beside PyTorch's own attention.

``python -m flash_helpers.run`` builds what ``attention()`` chooses, compares outputs with a float32 one,
times both in turn, says what was chosen and why, and names the next command.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text

import flash_attention
from flash_helpers.benchmark.implementations import AttentionImplementation
from flash_helpers.benchmark.peers import PEERS
from flash_helpers.benchmark.plan import Plan
from flash_helpers.benchmark.results import Row
from flash_helpers.benchmark.runner import bench, default_device
from flash_helpers.console.errors import shown_errors
from flash_helpers.console.output import TextConsole, console_for
from flash_helpers.console.pipe import patient_output
from flash_helpers.kernels.dtype import DType
from flash_helpers.problem import Problem
from flash_helpers.select.choice import attention_problem

SIZES = {  # batch, seq_len, heads, d_head, causal
    "cpu": ((1, 512, 8, 64, False), (1, 1024, 8, 64, True), (1, 1024, 4, 128, False)),
    "cuda": ((4, 4096, 16, 128, False), (4, 4096, 16, 128, True), (4, 4096, 32, 64, True)),
}
ROUNDS = {"cpu": 5, "cuda": 21}
OURS, PYTORCH = AttentionImplementation(), PEERS["sdpa"]


def problems_for(device: torch.device) -> list[Problem]:
    """What is computed: sizes that take seconds on this kind of device."""
    return [Problem(DType.BF16, b, h, s, d, causal) for b, s, h, d, causal in SIZES[device.type]]


def first_look(device: torch.device, console: TextConsole) -> list[Row]:
    """Builds, checks, times and explains; returns the rows.

    Raises:
        flash_helpers.build.BuildError: a kernel can't be compiled.
    """
    problems = problems_for(device)
    console.print(f"device   {device_name(device)}; torch {torch.__version__}")
    if device.type == "cuda":
        begin = time.monotonic()
        console.print("building what attention() chooses for these sizes; it is kept for the next time …")
        flash_attention.prepare([attention_problem(problem) for problem in problems], device)
        console.print(f"built    after {time.monotonic() - begin:.0f} s")
    plan = Plan(ROUNDS[device.type], ("hot",))
    rows = bench(problems, (), [OURS, PYTORCH], device=device, plan=plan).rows
    console.print(results_table(rows))
    console.print("sizes    b batch, h heads, s queries and keys, d head size")
    console.print("error    relative to a float32 reference; times are medians, both measured in turn")
    for row in rows:
        if row.status != "ok":
            console.print(f"{row.implementation} is {row.status}: {row.reason}", style="red", markup=False)
    for line in (*reason_lines(problems, device), *next_steps(device)):
        console.print(line, markup=False)
    return rows


def device_name(device: torch.device) -> str:
    """For people: the card's name, or the processor's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads; no GPU is used"


def results_table(rows: list[Row]) -> Table:
    """A line a problem: times and errors of both."""
    table = Table("problem", title=None)
    titles = ("attention()\nms", "PyTorch\nms", "times as\nfast", "attention()\nerror", "PyTorch\nerror")
    for title in titles:
        table.add_column(title, justify="right")
    table.add_column("")
    for problem in dict.fromkeys(row.problem for row in rows):
        ours, theirs = (
            next(r for r in rows if (r.problem, r.implementation) == (problem, one.name))
            for one in (OURS, PYTORCH)
        )
        times = [r.timings["hot"].median if r.timings else None for r in (ours, theirs)]
        ratio = f"{times[1] / times[0]:.2f}" if times[0] and times[1] else ""
        shown = ["" if time is None else f"{time:.3f}" for time in times]
        errors = ["" if r.error is None else f"{r.error:.1e}" for r in (ours, theirs)]
        verdict = "right" if ours.status == "ok" else ours.status.upper()
        table.add_row(problem.label(), *shown, ratio, *errors, Text(verdict))
    return table


def reason_lines(problems: list[Problem], device: torch.device) -> list[str]:
    """What ``attention()`` chose for each problem, and why; equal answers once."""
    chosen: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        q, k, v = problem.inputs(device)
        choice = flash_attention.explain_choice(q, k, v, causal=problem.causal)
        assert choice.kernel is not None  # no problem is empty
        name = "PyTorch's own fused attention" if choice.fused else choice.kernel.short_form()
        chosen.setdefault((name, choice.reason), []).append(problem.label())
    return [
        line
        for (name, reason), labels in chosen.items()
        for line in (f"for      {'; '.join(labels)}", f"  chosen {name}", f"  since  {reason}")
    ]


def next_steps(device: torch.device) -> list[str]:
    """Commands to go on with, as they can be typed here."""
    program = Path(sys.executable).with_name("flash-attention")
    command = str(program) if program.is_file() else f"{sys.executable} -m flash_attention"
    if program.is_file() and Path.cwd() in program.parents:
        command = str(program.relative_to(Path.cwd()))
    steps = {
        "cpu": ("doctor", "bench 256 64"),
        "cuda": ("bench 4096 64,128 --dtype bf16", "explain --seq-len 4096 --causal"),
    }[device.type]
    return ["next:", *(f"  {command} {step}" for step in (*steps, "--help"))]


def main() -> int:
    """Takes the first look; 1 if ``attention()`` was wrong or failed."""
    with patient_output(), shown_errors():
        rows = first_look(default_device(), console_for())
    return int(any(row.status != "ok" for row in rows if row.implementation == OURS.name))


if __name__ == "__main__":
    sys.exit(main())
