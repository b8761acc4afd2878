"""What the machine code of every Hopper kernel must show, checked without a GPU.

The compiler may give up quietly what the family lives on: wgmma that run one after another (C75xx), registers
spilled to local memory, register reallocation dropped, descriptors moved to uniform registers one wgmma at a
time. Each of these cost 10 to 50 % where it was met.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flash_helpers.kernels.gates import Instruction, MachineCode, compiler_violations
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.softmax import SoftmaxReference

MAX_DESCRIPTOR_MOVES = 4  # R2UR in the steady loop: the slots of K, V and Q, and one address
MAX_DRIFT = 0.05  # of a recorded count

COUNTED = ("HGMMA", "MUFU", "FFMA", "FMUL", "FADD", "FMNMX", "VIMNMX3", "F2FP", "SHFL", "SYNCS", "BAR")
"""Opcodes whose number in the steady loop follows from the configuration."""


def counts(code: MachineCode) -> dict[str, int]:
    """The opcodes of ``COUNTED``, the moves to uniform registers, and all together, of the steady loop."""
    found = Counter(i.name for i in code.hot)
    found["total"] = sum(found.values()) - found["NOP"]
    return {name: found[name] for name in (*COUNTED, "R2UR", "total")}


def violations(config: HopperForwardKernelConfig, code: MachineCode) -> list[str]:
    """Everything that a kernel's machine code lacks; empty when it passes.

    Args:
        config: the kernel's configuration.
        code: its machine code. ``code.loop`` is the steady loop, over tiles without a mask.
    """
    problems = compiler_violations(code)
    reallocations = sum(i.name == "USETMAXREG" for i in code.body)
    if reallocations != 2:
        problems.append(f"setmaxnreg appears {reallocations} times; once to give and once to take")
    if not code.loop:
        return [*problems, "no loop holds the products of exactly one tile"]
    problems += _loop_violations(config, code.loop)
    if code.recorded is not None:
        found = counts(code)
        problems += [
            f"steady loop: {found[name]} {name}, recorded {number}"
            for name, number in code.recorded.items()
            if name != "R2UR" and abs(found[name] - number) > MAX_DRIFT * number
        ]
    return problems


def _loop_violations(config: HopperForwardKernelConfig, loop: Sequence[Instruction]) -> list[str]:
    names = Counter(i.name for i in loop)
    opcodes = Counter(i.opcode for i in loop)
    problems = []
    if local := names["LDL"] + names["STL"]:
        problems.append(f"steady loop: {local} accesses to local memory")
    if names["R2UR"] > MAX_DESCRIPTOR_MOVES:
        problems.append(f"steady loop: {names['R2UR']} R2UR, at most {MAX_DESCRIPTOR_MOVES}")
    waits = sum(n for opcode, n in opcodes.items() if opcode.startswith("WARPGROUP.DEPBAR"))
    if waits != 2:
        problems.append(f"steady loop: {waits} waits for products; wanted 2")
    for what, prefix in (("waits for tiles", "SYNCS.PHASECHK"), ("releases of slots", "SYNCS.ARRIVE")):
        found = sum(n for opcode, n in opcodes.items() if opcode.startswith(prefix))
        if found != 2:
            problems.append(f"steady loop: {found} {what}; wanted 2, of K and of V")
    turns = Counter(i.opcode.split(".")[1] for i in loop if i.name == "BAR")
    wanted = {"SYNC": 1, "ARV": 1} if config.ping_pong else {}
    if turns != wanted:
        problems.append(f"steady loop: named barriers {dict(turns)}; wanted {wanted}")
    if config.softmax_reference == SoftmaxReference.LAGGED and not names["VIMNMX3"]:
        problems.append("steady loop: growth is not found by three-input integer maxima")
    return problems
