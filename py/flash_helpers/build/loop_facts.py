"""What is known of a built kernel without compiling it again: from its library's facts and machine code."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from flash_helpers.build.cache import FACTS_FILE, PREBUILT, KernelCache
from flash_helpers.build.gates import machine_code
from flash_helpers.build.index import find_library
from flash_helpers.build.main_loop import hot_path, main_loop
from flash_helpers.build.sass import DisassemblerNotFoundError, Instruction
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.model.recorded import CompiledFacts


def built_facts(kernel: Kernel, target: int, cache: KernelCache | None = None) -> CompiledFacts | None:
    """Registers and spills of a kernel that the cache or the package holds compiled, or None."""
    library = find_library(cache or KernelCache(), kernel, target)
    if library is None:
        return None
    where = "ships with the package" if library.is_relative_to(PREBUILT) else "built in the kernel cache"
    return _resources(library, where).get(kernel.short_form())


def library_facts(
    library: Path, kernels: Iterable[Kernel], source: str = "compiled"
) -> dict[Kernel, CompiledFacts]:
    """Registers, spills and main loops of a library's kernels; without a disassembler no loops.

    Raises:
        ValueError: the library does not hold one of them.
    """
    kernels, resources = list(kernels), _resources(library, source)
    bodies: dict[Kernel, list[Instruction]] = {}
    with contextlib.suppress(DisassemblerNotFoundError):
        bodies = machine_code(library, kernels)
    found = {}
    for kernel in kernels:
        facts = resources.get(kernel.short_form())
        if facts is None:
            raise ValueError(f"{library} does not say what {kernel.short_form()} takes; build it anew")
        loop = kernel_loop(kernel, bodies.get(kernel, []))
        instructions = sum(i.name != "NOP" for i in loop)
        found[kernel] = CompiledFacts(
            facts.registers, facts.spill_bytes, instructions, local_wavefronts(loop), source
        )
    return found


def kernel_loop(kernel: Kernel, body: list[Instruction]) -> list[Instruction]:
    """The hot path of the loop that holds the products of one K/V block; empty: none was found."""
    return hot_path(main_loop(body, kernel.config.products_per_block))


def local_wavefronts(loop: Iterable[Instruction]) -> int:
    """Clocks of shared memory that one warp's accesses to spilled registers take: one for each 4 bytes."""
    total = 0
    for instruction in loop:
        if instruction.name in ("LDL", "STL"):
            parts = instruction.opcode.split(".")
            total += 4 if "128" in parts else 2 if "64" in parts else 1
    return total


def _resources(library: Path, source: str) -> dict[str, CompiledFacts]:
    """By short form; empty for a library whose facts lack them or are damaged."""
    try:
        figures = json.loads((library.parent / FACTS_FILE).read_bytes())["resources"]
        return {
            str(name): CompiledFacts(int(registers), int(spills), source=source)
            for name, (registers, spills) in figures.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
