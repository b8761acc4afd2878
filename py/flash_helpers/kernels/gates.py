"""What the machine code of every kernel must show; what a family asks beyond that is in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Instruction(Protocol):
    """One instruction of a kernel."""

    @property
    def name(self) -> str:
        """Its operation, ``BAR``."""

    @property
    def opcode(self) -> str:
        """The same with modifiers, ``BAR.SYNC``."""


@dataclass(frozen=True)
class MachineCode:
    """What the compiler made of one kernel.

    Attributes:
        warnings: what ptxas warned of.
        spill_bytes: registers that it spilled, bytes a thread.
        body: all instructions.
        loop: those of the main loop, which has the products of one K/V block; empty: there is none.
        hot: of these, without blocks that are hardly ever entered.
        recorded: what ``Direction.counts`` gave for an earlier build; None: there is none.
    """

    warnings: Sequence[str]
    spill_bytes: int
    body: Sequence[Instruction]
    loop: Sequence[Instruction]
    hot: Sequence[Instruction]
    recorded: Mapping[str, int] | None = None


def compiler_violations(code: MachineCode) -> list[str]:
    """Warnings and spills."""
    problems = [f"ptxas: {warning}" for warning in code.warnings]
    if code.spill_bytes:
        problems.append(f"{code.spill_bytes} bytes of registers are spilled")
    return problems


def common_violations(config: Any, code: MachineCode) -> list[str]:
    """What is asked of every family: no warning, no spill, no local memory in the main loop."""
    problems = compiler_violations(code)
    if not code.loop:
        problems.append("no loop holds the products of exactly one block")
    if local := sum(i.name in ("LDL", "STL") for i in code.loop):
        problems.append(f"main loop: {local} accesses to local memory")
    return problems
