"""The machine code of a compiled kernel: the tools that print it, its functions and instructions."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from flash_helpers.build.nvcc import DISASSEMBLER_PACKAGES, candidates

CLASSES: dict[str, tuple[str, ...]] = {
    "HMMA": ("HMMA",),
    "HGMMA": ("HGMMA",),
    "LDSM": ("LDSM",),
    "LDGSTS": ("LDGSTS",),
    "TMA": ("UTMALDG", "UTMASTG", "UBLKCP"),
    "LDG": ("LDG",),
    "STG": ("STG",),
    "LDS": ("LDS",),
    "STS": ("STS",),
    "local": ("LDL", "STL"),
    "MUFU": ("MUFU",),
    "FFMA": ("FFMA", "FFMA2"),
    "FMUL": ("FMUL", "FMUL2"),
    "FADD": ("FADD", "FADD2"),
    "FMNMX": ("FMNMX", "FMNMX3", "VIMNMX", "VIMNMX3"),
    "FSEL": ("FSEL", "FSET", "FSETP"),
    "convert": ("F2FP", "F2F"),
    "shuffle": ("SHFL",),
    "barrier": ("BAR", "DEPBAR", "LDGDEPBAR", "SYNCS", "WARPSYNC"),
    "integer": (
        "IMAD",
        "IADD3",
        "LOP3",
        "SHF",
        "LEA",
        "ISETP",
        "IADD",
        "UIADD3",
        "ULOP3",
        "VIADD",
        "UIMAD",
        "USHF",
    ),
    "move": ("MOV", "CS2R", "UMOV", "PRMT", "SEL", "R2UR", "S2R"),
}
"""Instruction classes by the first part of the opcode, in the order in which they are shown."""

ENDS = ("EXIT", "RET", "BRX", "JMX", "JMP", "KILL")
"""Opcodes behind which a function does not go on where it stands."""

_FUNCTION = re.compile(r"^\s*(?:Function\s*:\s*(?P<a>\S+)|\.text\.(?P<b>\S+?):)\s*$")
_INSTRUCTION = re.compile(r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>[^;]+);")
_LABEL = re.compile(r"^\s*(?P<name>\.L_\w+):\s*$")
_TARGET = re.compile(r"(?:0x(?P<hex>[0-9a-f]+)|`\((?P<label>\.L_\w+)\))\s*$")


class DisassemblerNotFoundError(RuntimeError):
    """No cuobjdump was found; the message says how to get it."""


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        address: byte offset in the function.
        opcode: with its modifiers, without a predicate, e.g. ``HMMA.16816.F32``.
        target: where a branch goes, None for others.
        always: a branch or an exit without a condition: what stands behind it does not follow it.
    """

    address: int
    opcode: str
    target: int | None = None
    always: bool = False

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".")[0]


def find_tool(name: str) -> Path | None:
    """``cuobjdump`` or ``nvdisasm``, from the same places as the compiler; ``None`` where there is none."""
    return next((path for path in candidates(name) if os.access(path, os.X_OK)), None)


def disassemble(binary: Path) -> str:
    """The machine code of a shared object, object file or cubin, as cuobjdump prints it.

    Raises:
        DisassemblerNotFoundError: no cuobjdump.
        ValueError: the file holds no machine code.
    """
    tool = find_tool("cuobjdump")
    if tool is None:
        raise DisassemblerNotFoundError(
            "cuobjdump was not found in CUDA_HOME, PATH or pip packages: "
            f"pip install {' '.join(DISASSEMBLER_PACKAGES)}"
        )
    done = subprocess.run([tool, "-sass", binary], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"cuobjdump can't read {binary}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def parse_functions(text: str) -> dict[str, list[Instruction]]:
    """Function name (mangled) to its instructions, from the output of cuobjdump or nvdisasm."""
    functions: dict[str, list[Instruction]] = {}
    pending: list[tuple[list[Instruction], int, str]] = []  # branches to labels that may come later
    labels: dict[str, int] = {}
    unplaced: list[str] = []
    current: list[Instruction] = []
    for line in text.splitlines():
        if match := _FUNCTION.match(line):
            current = functions.setdefault(match["a"] or match["b"], [])
        elif match := _LABEL.match(line):
            unplaced.append(match["name"])
        elif match := _INSTRUCTION.match(line):
            address = int(match["address"], 16)
            labels.update(dict.fromkeys(unplaced, address))
            unplaced.clear()
            instruction, label = _parse(address, match["text"])
            if label:
                pending.append((current, len(current), label))
            current.append(instruction)
    for body, index, label in pending:
        body[index] = replace(body[index], target=labels.get(label))
    return functions


def count_classes(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Instructions by class, only those that occur, in the order of ``CLASSES``; ``MUFU.EX2`` apart."""
    instructions = list(instructions)
    counts = Counter(i.name for i in instructions)
    result = {}
    for name, opcodes in CLASSES.items():
        if number := sum(counts[opcode] for opcode in opcodes):
            result[name] = number
        if name == "MUFU" and number:
            result["MUFU.EX2"] = sum(i.opcode.startswith("MUFU.EX2") for i in instructions)
    known = {opcode for opcodes in CLASSES.values() for opcode in opcodes}
    if other := sum(n for opcode, n in counts.items() if opcode not in known):
        result["other"] = other
    result["total"] = len(instructions)
    return result


def _parse(address: int, text: str) -> tuple[Instruction, str | None]:
    words = text.split()
    predicated = words[0].startswith("@")
    opcode = words[predicated]
    name = opcode.split(".")[0]
    if name != "BRA":
        return Instruction(address, opcode, always=name in ENDS and not predicated), None
    match = _TARGET.search(text.strip())
    # A condition may be an operand too: BRA.DIV UR4, target.
    always = not predicated and len(words) == 2
    if match is None:
        return Instruction(address, opcode, always=always), None
    if match["hex"]:
        return Instruction(address, opcode, int(match["hex"], 16), always), None
    return Instruction(address, opcode, always=always), match["label"]
