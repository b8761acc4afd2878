"""The machine code of a compiled kernel: the tools that print it, its main loop, its instructions."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_helpers.build.nvcc import DISASSEMBLER_PACKAGES, candidates

MMA = ("HMMA", "HGMMA")

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
    "FMNMX": ("FMNMX", "FMNMX3"),
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
    """

    address: int
    opcode: str
    target: int | None = None

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
        body[index] = Instruction(body[index].address, body[index].opcode, labels.get(label))
    return functions


def main_loop(instructions: Sequence[Instruction], n_products: int | None = None) -> list[Instruction]:
    """The innermost loop that holds matrix instructions; empty when there is none.

    Of several with equally few products (one with a mask, one without) it is the one with the shortest hot
    path: the one without extra work. A loop that also has the softmax's exponentials goes before one that has
    not. Where there are warpgroup instructions, only those count as matrix instructions: other products are
    of a rare path.

    Args:
        instructions: one function.
        n_products: how many matrix instructions the loop has; None: any number.
    """
    products = ("HGMMA",) if any(i.name == "HGMMA" for i in instructions) else MMA
    loops: list[tuple[int, list[Instruction]]] = []  # with their number of products
    for instruction in instructions:
        if instruction.target is not None and instruction.target <= instruction.address:
            body = [i for i in instructions if instruction.target <= i.address <= instruction.address]
            found = sum(i.name in products for i in body)
            if found if n_products is None else found == n_products:
                loops.append((found, body))
    loops = [loop for loop in loops if any(i.opcode.startswith("MUFU.EX2") for i in loop[1])] or loops
    fewest = min((found for found, _ in loops), default=0)
    innermost = [body for found, body in loops if found == fewest]
    return min(innermost, key=lambda body: len(hot_path(body)), default=[])


def hot_path(loop: Sequence[Instruction]) -> list[Instruction]:
    """A loop of warpgroup products without the block that handles growth of the softmax reference.

    Hardly any tile enters it. It is the longest stretch that a forward branch leaps and that loads matrices
    from shared memory, which the loop has no other need for. Other loops are returned as they are.
    """
    skipped: tuple[int, int] = (0, 0)
    if any(i.name == "HGMMA" for i in loop):
        for branch in loop:
            if branch.target is None or not branch.address < branch.target <= loop[-1].address:
                continue
            names = {i.name for i in loop if branch.address < i.address < branch.target}
            longer = branch.target - branch.address > skipped[1] - skipped[0]
            if "LDSM" in names and "HGMMA" not in names and longer:
                skipped = (branch.address, branch.target)
    return [i for i in loop if not skipped[0] < i.address < skipped[1]]


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
    if words[0].startswith("@"):
        words = words[1:]
    opcode = words[0]
    if opcode.split(".")[0] != "BRA":
        return Instruction(address, opcode), None
    match = _TARGET.search(text.strip())
    if match is None:
        return Instruction(address, opcode), None
    if match["hex"]:
        return Instruction(address, opcode, int(match["hex"], 16)), None
    return Instruction(address, opcode), match["label"]
