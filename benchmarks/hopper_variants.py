"""Times variants of the Hopper family's chosen kernels against each other and against the peers.

    python benchmarks/hopper_variants.py --plan benchmarks/hopper_variants.txt --json variants.json
    python benchmarks/hopper_variants.py --d 64 --causal yes --s 512,1024 --change "early_pass=1 trimmed=1"
    python benchmarks/hopper_variants.py --d 256 --kernels "(BF16, 256, 128, 48, 2wg): tma+…"

Each cell (head size, mask, length; batch x length and heads x head size are constant) starts from the kernel
that ``choose_hopper_kernel`` picks for it. A variant is that kernel with some fields changed, or a kernel
given by its short form. All kernels are compiled first, in parallel; one that spills or that the compiler
serialises is left out, as is one that is wrong on awkward inputs or on the cell's own. The others and the
peers are measured in random order, launch cost hidden, medians over the rounds.

A plan has one variant a line: head size, mask (``no``, ``yes``, ``both``), lengths (``512-2048``), changes.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from flash_helpers.benchmark.correctness import output_error, reference
from flash_helpers.benchmark.ending import end_with
from flash_helpers.benchmark.environment import environment
from flash_helpers.benchmark.implementations import KernelImplementation
from flash_helpers.benchmark.peers import select_peers
from flash_helpers.benchmark.plan import Plan
from flash_helpers.benchmark.results import Results, Row
from flash_helpers.benchmark.runner import measure_problem, named_device
from flash_helpers.benchmark.timers import timer_for
from flash_helpers.console.alone import run_alone
from flash_helpers.console.errors import shown_errors
from flash_helpers.kernel_configs import (
    DType,
    ForwardKernel,
    HopperForwardKernelConfig,
    choose_hopper_kernel,
    parse_kernel_name_into_config,
)
from flash_helpers.problem import Problem

TARGET = 90
TOKENS, HIDDEN = 16384, 2048  # of every cell
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MASKS = {"no": (False,), "yes": (True,), "both": (False, True)}
AWKWARD = ((2, 777, 777, 2), (1, 300, 1000, 4), (3, 64, 130, 1), (1, 2500, 2500, 2))
"""(batch, seq_len_q, seq_len_k, heads): ragged tiles, unequal lengths, less than one tile, many tiles."""
STARTUP_SECONDS, CHECK_SECONDS = 90, 20  # until a kernel counts as hanging
BASE = "chosen"  # name of the variant without changes


@dataclass(frozen=True)
class Variant:
    """Changes to the chosen kernel of some cells.

    Attributes:
        d_head, causal, shortest, longest: the cells.
        changes: what the user wrote, ``field=value`` separated by blanks; empty: none.
    """

    d_head: int
    causal: bool
    shortest: int
    longest: int
    changes: str

    def fits(self, problem: Problem) -> bool:
        """Whether the variant is meant for this cell."""
        return (self.d_head, self.causal) == (
            problem.d_head,
            problem.causal,
        ) and self.shortest <= problem.seq_len <= self.longest

    def kernel(self, problem: Problem) -> ForwardKernel:
        """The kernel for a cell.

        Raises:
            ValueError: no such field, or a configuration that no GPU runs.
        """
        chosen, _ = choose_hopper_kernel(problem.dtype, problem.d_head, problem.causal, problem.seq_len)
        assert isinstance(chosen.config, HopperForwardKernelConfig)
        config = change(chosen.config, self.changes)
        if reason := config.malformed_reason():
            raise ValueError(f"{problem.label()}, {self.changes!r}: {reason}")
        return ForwardKernel(config, chosen.traits)


def change(config: HopperForwardKernelConfig, changes: str) -> HopperForwardKernelConfig:
    """``config`` with fields replaced, e.g. by ``"B_c=48 q_stages=2"``; enumerators by number.

    Raises:
        ValueError: no such field, or a value that its type does not have.
    """
    names = {f.name for f in fields(config)}
    values: dict[str, Any] = {}
    for part in changes.split():
        name, _, text = part.partition("=")
        if name not in names or not text.isdigit():
            raise ValueError(f"{part!r} is no change; write field=number with a field out of {sorted(names)}")
        values[name] = type(getattr(config, name))(int(text))
    return replace(config, **values)


def read_plan(path: Path) -> Iterator[Variant]:
    """The variants of a plan file. ``#`` starts a comment.

    Raises:
        ValueError: a line that is not ``d_head mask shortest-longest changes…``.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        try:
            d_head, mask, lengths, *changes = words
            shortest, _, longest = lengths.partition("-")
            for causal in MASKS[mask]:
                yield Variant(int(d_head), causal, int(shortest), int(longest or shortest), " ".join(changes))
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{path}:{number}: {line!r} is not 'd_head no|yes|both 512-2048 field=value …'"
            ) from error


def cells(d_heads: Sequence[int], causal: str, seq_lens: Sequence[int]) -> list[Problem]:
    """The grid of problems in bf16."""
    return [
        Problem(DType.BF16, TOKENS // s, HIDDEN // d, s, d, causal=c)
        for d in d_heads
        for c in MASKS[causal]
        for s in seq_lens
    ]


def compile_all(kernels: Sequence[ForwardKernel], jobs: int, console: Console) -> set[ForwardKernel]:
    """Builds the kernels; returns those that the compiler neither spilled nor serialised."""
    from flash_helpers.build import build_kernels

    start = time.perf_counter()
    built = [k for result in build_kernels(kernels, [TARGET], jobs) for k in result.kernels]
    good = set()
    for kernel in built:
        if kernel.spill_bytes or kernel.warnings:
            why = f"{kernel.spill_bytes} bytes spilled" if kernel.spill_bytes else kernel.warnings[0]
            console.print(f"left out  {kernel.kernel.short_form()}: {why}", markup=False, highlight=False)
        else:
            good.add(kernel.kernel)
    console.print(f"{len(built)} kernels built in {time.perf_counter() - start:.0f} s", highlight=False)
    return good


def awkward_failure(kernel: ForwardKernel, device: torch.device) -> str | None:
    """Why a kernel is wrong on awkward inputs, or None.

    Ragged and unequal lengths, standard normal; and scores that jump by far more than 2^127 between tiles.
    Outputs are poisoned before, and a second run must give the same bits.
    """
    from flash_attention import attention

    config, causal = kernel.config, kernel.traits.causal
    dtype = torch.bfloat16 if config.dtype == DType.BF16 else torch.float16
    generator = torch.Generator(device).manual_seed(0)
    for batch, seq_len_q, seq_len_k, heads in AWKWARD:
        for jumps in (False, True):

            def normal(seq_len: int, b: int = batch, h: int = heads) -> torch.Tensor:
                return torch.randn(b, seq_len, h, config.d_head, device=device, generator=generator)

            q, k, v = normal(seq_len_q), normal(seq_len_k), normal(seq_len_k)
            if jumps:  # the last tiles come first, and are small
                q, k = 8 * q, 10 * k
                k[:, seq_len_k // 2 :] *= 1e-3
            q, k, v = (x.to(dtype) for x in (q, k, v))
            outputs = [torch.full_like(q, float("nan")) for _ in range(2)]
            for o in outputs:
                attention(q, k, v, causal=causal, config=config, out=o)
            what = f"{batch} x {seq_len_q} x {seq_len_k} x {heads}{', jumping scores' if jumps else ''}"
            if not torch.equal(*outputs):
                return f"{what}: two runs differ"
            if why := output_error(outputs[0], reference(q, k, v, causal)).wrong_reason(config.dtype):
                return f"{what}: {why}"
    return None


def check_all(kernels: Sequence[ForwardKernel]) -> dict[ForwardKernel, str]:
    """Why kernels are wrong on awkward inputs; those that are right are left out.

    They run in another process: one that never ends, or that breaks the CUDA context, is reported, and a new
    process goes on with the rest.
    """
    context = multiprocessing.get_context("spawn")
    failures: dict[ForwardKernel, str] = {}
    remaining = list(kernels)
    while remaining:
        mine, its = context.Pipe()
        process = context.Process(target=_check_worker, args=(its, remaining), daemon=True)
        process.start()
        its.close()
        patience = STARTUP_SECONDS
        while remaining:
            kernel = remaining[0]
            try:
                goes_on = mine.poll(patience)
                reason, goes_on = mine.recv() if goes_on else (f"no answer within {patience} s", False)
            except EOFError:
                reason, goes_on = "its process died", False
            remaining.pop(0)
            if reason:
                failures[kernel] = reason
            if not goes_on:
                break
            patience = CHECK_SECONDS
        process.kill()
        process.join()
    return failures


def _check_worker(connection: Connection, kernels: Sequence[ForwardKernel]) -> None:
    """Sends (reason or None, whether it goes on) for each kernel; it ends at the first that raises."""
    device = torch.device("cuda", torch.cuda.current_device())
    for kernel in kernels:
        try:
            connection.send((awkward_failure(kernel, device), True))
        except Exception as error:  # it may have broken the CUDA context
            connection.send((f"{type(error).__name__}: {error}", False))
            return


def summary(results: Results, names: dict[tuple[Problem, str], str], mode: str) -> list[Table]:
    """One table a head size and mask: a line a variant, a column a length: TFLOP/s, / chosen, / best peer."""
    tables = []
    groups = dict.fromkeys((row.problem.d_head, row.problem.causal) for row in results.rows)
    for d_head, causal in groups:
        rows = [r for r in results.rows if (r.problem.d_head, r.problem.causal) == (d_head, causal)]
        problems = list(dict.fromkeys(r.problem for r in rows))
        table = Table(title=f"d {d_head}{' causal' if causal else ''}, {mode}", title_justify="left")
        table.add_column("variant", overflow="fold")
        for problem in problems:
            table.add_column(str(problem.seq_len), justify="right")
        lines: dict[str, dict[Problem, str]] = {}
        for problem in problems:
            here = [r for r in rows if r.problem == problem]
            rates = {names.get((problem, r.implementation), r.implementation): r.tflops(mode) for r in here}
            peers = [r.tflops(mode) or 0.0 for r in here if r.kind == "peer"]
            for row in here:
                name = names.get((problem, row.implementation), row.implementation)
                lines.setdefault(name, {})[problem] = _cell(
                    row, mode, rates.get(BASE), max(peers, default=0.0)
                )
        for name, cells_of_line in lines.items():
            table.add_row(name, *(cells_of_line.get(problem, "") for problem in problems))
        tables.append(table)
    return tables


def _cell(row: Row, mode: str, base: float | None, best_peer: float) -> str:
    rate = row.tflops(mode)
    if not rate:
        return row.status
    text = f"{rate:.0f}"
    if row.kind == "kernel" and base:
        text += f" {rate / base:.3f}"
    if row.kind == "kernel" and best_peer:
        text += f" {rate / best_peer:.3f}"
    return text


@shown_errors()
def main(
    d: Annotated[str, typer.Option(help="head sizes, joined by commas")] = "64,128,256",
    causal: Annotated[str, typer.Option(help="no, yes or both")] = "both",
    s: Annotated[str, typer.Option(help="lengths, joined by commas")] = ",".join(map(str, LENGTHS)),
    change: Annotated[list[str] | None, typer.Option(help="a variant of every cell's chosen kernel")] = None,
    plan: Annotated[Path | None, typer.Option(help="file with variants, see above")] = None,
    kernels: Annotated[str, typer.Option(help="short forms joined by ;")] = "",
    peers: Annotated[str, typer.Option(help="names joined by commas, or none")] = "fa2,cudnn,fa3,fa4",
    rounds: Annotated[int, typer.Option(help="measurements of each kernel")] = 9,
    modes: Annotated[str, typer.Option(help="timings, joined by commas: hot, paused, …")] = "hot",
    minutes: Annotated[float, typer.Option(help="no cell starts after this")] = 8.0,
    jobs: Annotated[int, typer.Option(help="compilers at a time; 0: one a core")] = 0,
    json: Annotated[Path | None, typer.Option(help="result file")] = None,
    build_only: Annotated[bool, typer.Option(help="compile, and say what is left out")] = False,
) -> None:
    """Times variants of the Hopper family's chosen kernels against each other and against the peers."""
    start = time.monotonic()
    device = named_device("cpu" if build_only else "cuda:0")
    console = Console(width=None if os.isatty(1) else 200)
    problems = cells([int(x) for x in d.split(",")], causal, [int(x) for x in s.split(",")])
    variants = list(read_plan(plan)) if plan else []
    variants += [
        Variant(p.d_head, p.causal, p.seq_len, p.seq_len, text) for p in problems for text in change or []
    ]
    extra = [parse_kernel_name_into_config(text.strip()) for text in kernels.split(";") if text.strip()]

    of_cell: dict[Problem, dict[ForwardKernel, str]] = {}
    for problem in problems:
        chosen = Variant(problem.d_head, problem.causal, 0, problem.seq_len, "")
        named = {chosen.kernel(problem): BASE}
        for variant in variants:
            if variant.fits(problem):
                named.setdefault(variant.kernel(problem), variant.changes or BASE)
        for config in extra:
            implementation = KernelImplementation.of(config, problem)
            if config.d_head == problem.d_head:
                named.setdefault(implementation.kernel, config.short_form())
        of_cell[problem] = named
    everything = sorted({kernel for named in of_cell.values() for kernel in named})
    good = compile_all(everything, jobs or os.cpu_count() or 1, console)
    if build_only:
        raise typer.Exit(0 if len(good) == len(everything) else 1)

    for kernel, why in check_all(sorted(good)).items():
        console.print(f"wrong  {kernel.short_form()}: {why}", markup=False, highlight=False)
        good.discard(kernel)
    console.print(f"checked after {time.monotonic() - start:.0f} s", highlight=False)

    results = Results(benchmark="hopper_variants")
    names: dict[tuple[Problem, str], str] = {}
    facts, timer = environment(device), timer_for(device)
    for problem, named in of_cell.items():
        if time.monotonic() - start > 60 * minutes:
            console.print(f"{problem.label()}: skipped, the {minutes:g} minutes are over", highlight=False)
            continue
        implementations = [*select_peers(peers), *(KernelImplementation(k) for k in named if k in good)]
        names |= {(problem, k.short_form()): name for k, name in named.items()}
        rows = measure_problem(problem, implementations, device, Plan(rounds, tuple(modes.split(","))), timer)
        results.rows += [
            replace(row, environment=facts, variant=names.get((problem, row.implementation), ""))
            for row in rows
        ]
        for row in rows:
            if row.status in ("wrong", "failed"):
                console.print(f"{row.status}  {row.implementation}: {row.reason}", markup=False)
        if json is not None:
            results.save(json)
    for mode in modes.split(","):
        for table in summary(results, names, mode):
            console.print(table)
    console.print(f"done after {time.monotonic() - start:.0f} s", highlight=False)
    end_with(results.file())


if __name__ == "__main__":
    run_alone(main)
