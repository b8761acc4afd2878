"""Compiles whole sets of kernels and says what their machine code lacks. No GPU is needed.

``python -m flash_helpers.build.gates --target 80 --target 90`` looks at every kernel that is built ahead of
time or that a choice names for these generations, and on sm_90 at the ladders: no spilled registers, no
compiler warning, no local memory in the main loop, and what ``Direction.violations`` of a family asks beyond
that. Exit status 1 when one fails. What is compiled stays in the cache. ``--record`` keeps the instruction
counts that tests and ``docs/kernels/`` compare with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from flash_helpers.build import CompiledKernel, build_kernels
from flash_helpers.build.main_loop import hot_path, main_loop
from flash_helpers.build.ptxas import parse_ptxas
from flash_helpers.build.sass import Instruction, disassemble, parse_functions
from flash_helpers.console.alone import run_alone
from flash_helpers.console.errors import shown_errors
from flash_helpers.kernel_configs import (
    DType,
    ForwardKernel,
    choose_ampere_kernel,
    parse_kernel_name_into_config,
)
from flash_helpers.kernels.families import DIRECTIONS, direction_of, family_of, kernel_of
from flash_helpers.kernels.gates import MachineCode
from flash_helpers.kernels.kernel import Kernel, KernelConfig
from flash_helpers.kernels.ladders import LADDERS, get_ladder

TARGETS = (80, 86, 89, 90)
LADDER_TARGET = 90  # where the ladders are measured
RECORDS = Path(__file__).parents[3] / "tests" / "unit"
HOPPER_RECORD = RECORDS / "hopper_instruction_counts.json"
AMPERE_RECORD = RECORDS / "ampere_instruction_counts.json"

Body = list[Instruction]


def kernels_of(target: int) -> list[Kernel]:
    """Every kernel that the project builds or chooses for a GPU generation, sorted."""
    kernels = {kernel for direction in DIRECTIONS for kernel in direction.checked(target)}
    if target == LADDER_TARGET:
        kernels |= {
            kernel_of(rung.config, causal=causal)
            for family, d_heads in LADDERS.items()
            for d_head in d_heads
            for causal in (False, True)
            for rung in get_ladder(family, DType.BF16, d_head, causal)
        }
    return sorted(kernels, key=Kernel.short_form)


def compared_kernels(target: int) -> list[ForwardKernel]:
    """The Ampere family's fastest choices for a generation, whose instructions are compared with sm_90's."""
    capability = divmod(target, 10)
    return list(
        dict.fromkeys(
            choose_ampere_kernel(DType.BF16, d_head, causal, 8192, capability)[0]
            for d_head in (64, 128, 256)
            for causal in ((False, True) if d_head == 128 else (False,))
        )
    )


def kernel_of_symbol(name: str) -> Kernel | None:
    """The kernel whose main function has a mangled name; None: a smaller function beside it, or of nobody.

    The main function of a direction is called ``…forward_kernel``, ``…backward_kernel``.
    """
    match = re.search(r"(forward|backward)_kernel\w*?(?:Forward|Backward)Traits((?:Lb[01]E)*)E", name)
    if match is None:
        return None
    config = parse_kernel_name_into_config(name)
    direction = direction_of(config)
    if direction.name != match[1]:
        return None
    known = [f.name for f in fields(direction.kernel.traits_type)]
    flags = [flag == "1" for flag in re.findall(r"Lb([01])E", match[2])]
    return kernel_of(config, **dict(zip(known, flags, strict=False)))  # the last that are off are left out


def machine_code(library: Path, kernels: Iterable[Kernel]) -> dict[Kernel, Body]:
    """The code of each kernel of a library, found by the configuration and traits in its mangled name.

    Raises:
        DisassemblerNotFoundError: no cuobjdump.
        ValueError: a kernel that the library does not hold.
    """
    wanted = set(kernels)
    found = {}
    for name, body in parse_functions(disassemble(library)).items():
        kernel = kernel_of_symbol(name)
        if kernel in wanted and body:
            found[kernel] = body
    if missing := wanted - set(found):
        names = "; ".join(sorted(kernel.short_form() for kernel in missing))
        raise ValueError(f"{library} does not hold {names}; build it anew")
    return found


def code_of(compiled: CompiledKernel, body: Body, recorded: Mapping[str, int] | None = None) -> MachineCode:
    """What the gates look at.

    Args:
        compiled: the kernel, and what the compiler said.
        body: its code.
        recorded: counts of an earlier build.
    """
    report, loop = parse_ptxas(compiled.log), main_loop(body, compiled.kernel.config.products_per_block)
    return MachineCode(report.warnings, report.spill_bytes, body, loop, hot_path(loop), recorded)


def violations(compiled: CompiledKernel, body: Body, recorded: Mapping[str, int] | None = None) -> list[str]:
    """What a kernel's machine code lacks; empty when it passes. Arguments as of ``code_of``."""
    config = compiled.kernel.config
    return direction_of(config).violations(config, code_of(compiled, body, recorded))


def per_256_products(config: KernelConfig, body: Body) -> int:
    """Instructions of the main loop for 256 products of the tensor cores."""
    loop = main_loop(body, config.products_per_block)
    products = sum(i.name == "HMMA" for i in loop)
    return round(256 * sum(i.name != "NOP" for i in loop) / products)


def load_record(path: Path) -> dict[str, Any]:
    """Recorded counts; none where there is no file (an installed package has no tests)."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def save_record(path: Path, counts: Mapping[str, Any]) -> None:
    """One kernel a line, sorted."""
    lines = [f" {json.dumps(name)}: {json.dumps(counts[name])}" for name in sorted(counts)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def record_ampere(jobs: int | None = None) -> dict[str, dict[str, int]]:
    """Kernel to target to ``per_256_products``, for each target's choices: there and on sm_90."""
    counts: dict[str, dict[str, int]] = {}
    for target in TARGETS:
        others = compared_kernels(target) if target != LADDER_TARGET else []
        kernels = others or sorted({k for t in TARGETS for k in compared_kernels(t)})
        (result,) = build_kernels(kernels, [target], jobs)
        for kernel, body in machine_code(result.path, kernels).items():
            count = per_256_products(kernel.config, body)
            counts.setdefault(kernel.short_form(), {})[str(target)] = count
    return counts


def check(target: int, jobs: int | None, record: bool) -> int:
    """Checks every kernel for one target, printing what fails; how many do.

    Raises:
        ValueError: another target than those of ``TARGETS``, for which nothing is chosen.
    """
    if target not in TARGETS:
        raise ValueError(f"target is {target}; kernels are chosen for {', '.join(map(str, TARGETS))}")
    recorded = load_record(HOPPER_RECORD)
    failures = 0
    kernels = [k for k in kernels_of(target) if family_of(k).runs_on(target)]
    for result in build_kernels(kernels, [target], jobs):
        code = machine_code(result.path, [compiled.kernel for compiled in result.kernels])
        for compiled in result.kernels:
            name, body = compiled.kernel.short_form(), code[compiled.kernel]
            if record and (counts := direction_of(compiled.kernel).counts):
                recorded[name] = counts(code_of(compiled, body))
            problems = violations(compiled, body, recorded.get(name))
            failures += bool(problems)
            for problem in problems:
                typer.echo(f"sm_{target}  {name}: {problem}")
    typer.echo(f"sm_{target}: {len(kernels)} kernels, {failures} fail")
    if record and target == LADDER_TARGET:
        save_record(HOPPER_RECORD, recorded)
    return failures


@shown_errors()
def main(
    target: Annotated[list[int] | None, typer.Option(help="80, 86, 89, 90; default: all")] = None,
    jobs: Annotated[int | None, typer.Option(help="compilations at the same time")] = None,
    record: Annotated[bool, typer.Option("--record", help="keep the instruction counts found")] = False,
) -> None:
    """What the machine code of whole sets of kernels lacks."""
    failures = sum(check(number, jobs, record) for number in target or TARGETS)
    if record:
        save_record(AMPERE_RECORD, record_ampere(jobs))
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    run_alone(main)
