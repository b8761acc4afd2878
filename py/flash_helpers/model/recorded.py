"""What compilers made of kernels before: registers, spills and main loops that ship with the package.

``python -m flash_helpers.build.record`` writes ``recorded.json``. Predictions are held against it, and where
it has a kernel its facts take their place.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flash_helpers.kernels.kernel import Kernel

RECORD = Path(__file__).with_name("recorded.json")


@dataclass(frozen=True)
class CompiledFacts:
    """What the compiler made of one kernel.

    Attributes:
        registers: of a thread.
        spill_bytes: stores and loads to local memory, bytes a thread.
        instructions: that one warp executes for a K/V block in the main loop, without blocks that are hardly
            ever entered; 0: not known.
        local_wavefronts: clocks of shared memory that their accesses to spilled registers take.
        source: where this is known from.
    """

    registers: int
    spill_bytes: int
    instructions: int = 0
    local_wavefronts: int = 0
    source: str = ""


def recorded_facts(kernel: Kernel, target: int) -> CompiledFacts | None:
    """The recorded facts of a kernel for a GPU generation, or None."""
    return _facts().get((kernel.short_form(), target))


def all_recorded() -> dict[tuple[str, int], CompiledFacts]:
    """(kernel's short form, target) to facts."""
    return dict(_facts())


def compiler() -> str:
    """The compiler of the record."""
    return str(_read()["compiler"])


def write_record(path: Path, made_by: str, entries: dict[tuple[str, int], CompiledFacts]) -> None:
    """Writes a record, a kernel a line."""
    by_kernel: dict[str, dict[str, list[int]]] = {}
    for (kernel, target), f in sorted(entries.items()):
        figures = [f.registers, f.spill_bytes, f.instructions, f.local_wavefronts]
        by_kernel.setdefault(kernel, {})[str(target)] = figures
    lines = [f"  {json.dumps(kernel)}: {json.dumps(figures)}" for kernel, figures in by_kernel.items()]
    text = (
        f'{{\n "compiler": {json.dumps(made_by)},\n'
        ' "columns": ["registers", "spill_bytes", "instructions", "local_wavefronts"],\n'
        ' "kernels": {\n' + ",\n".join(lines) + "\n }\n}\n"
    )
    path.write_text(text, encoding="utf-8")


@lru_cache(1)
def _read() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content


def _facts_of(figures: list[int], source: str) -> CompiledFacts:
    registers, spill_bytes, instructions, local_wavefronts = map(int, figures[:4])
    return CompiledFacts(registers, spill_bytes, instructions, local_wavefronts, source=source)


@lru_cache(1)
def _facts() -> dict[tuple[str, int], CompiledFacts]:
    source = f"recorded with {compiler()}"
    return {
        (kernel, int(target)): _facts_of(figures, source)
        for kernel, targets in _read()["kernels"].items()
        for target, figures in targets.items()
    }
