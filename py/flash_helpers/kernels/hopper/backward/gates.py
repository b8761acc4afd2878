"""What the machine code of every Hopper-class backward kernel must show, checked without a GPU.

The gates look at the main kernel, that of dK and dV; of dQ's own kernel they see the compiler's warnings and
spills.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flash_helpers.kernels.gates import Instruction, MachineCode, compiler_violations
from flash_helpers.kernels.hopper.backward.config import HopperBackwardKernelConfig
from flash_helpers.kernels.hopper.backward.resources import WARPGROUP_SIZE, DqOutput

MAX_DESCRIPTOR_MOVES = 16  # R2UR in a step: descriptors belong in uniform registers


def violations(config: HopperBackwardKernelConfig, code: MachineCode) -> list[str]:
    """Everything that a kernel's machine code lacks; empty when it passes.

    Args:
        config: the kernel's configuration.
        code: its machine code. ``code.loop`` is the loop over query blocks.
    """
    problems = compiler_violations(code)
    reallocations = sum(i.name == "USETMAXREG" for i in code.body)
    if reallocations != 2:
        problems.append(f"setmaxnreg appears {reallocations} times; once to give and once to take")
    if not sum(i.name == "UTMALDG" for i in code.body):
        problems.append("no bulk tensor copy (UTMALDG) loads a tile")
    problems += _sum_violations(config, code.body)
    if not code.loop:
        return [*problems, "no loop holds the products of exactly one query block"]
    return problems + _loop_violations(config, code.loop)


def _sum_violations(config: HopperBackwardKernelConfig, body: Sequence[Instruction]) -> list[str]:
    """How dQ leaves: as the configuration says, and in no other way."""
    bulk = sum(i.name == "UBLKRED" for i in body)
    single = sum(i.name in ("RED", "REDG") for i in body)
    wanted_bulk = config.dq_output.is_staged
    wanted_single = config.dq_output == DqOutput.REGISTER_REDUCTION
    problems = []
    if bool(bulk) != wanted_bulk:
        problems.append(f"{bulk} bulk reductions (UBLKRED); dq_output is {config.dq_output.name}")
    if bool(single) != wanted_single:
        problems.append(f"{single} reductions from registers (RED); dq_output is {config.dq_output.name}")
    return problems


def _loop_violations(config: HopperBackwardKernelConfig, loop: Sequence[Instruction]) -> list[str]:
    names = Counter(i.name for i in loop)
    problems = []
    if local := names["LDL"] + names["STL"]:
        problems.append(f"loop: {local} accesses to local memory")
    if names["R2UR"] > MAX_DESCRIPTOR_MOVES:
        problems.append(f"loop: {names['R2UR']} R2UR, at most {MAX_DESCRIPTOR_MOVES}")
    scores = (
        config.B_r * config.B_c // (WARPGROUP_SIZE * (1 if config.split_gradients else config.n_consumers))
    )
    if names["MUFU"] < scores:
        problems.append(f"loop: {names['MUFU']} exponentials; each of a thread's {scores} scores has one")
    turns = Counter(i.opcode.split(".")[1] for i in loop if i.name == "BAR")
    paths = 1 + config.trimmed  # a step, and one of a block that the warpgroup does not see
    both = paths * (config.ping_pong + config.dq_output.is_staged)  # turns, staged dQ
    # Under a mask one more a path, on the rare way that clears rows of queries that see no key.
    if turns["ARV"] != both or not both <= turns["SYNC"] <= both + paths:
        problems.append(
            f"loop: named barriers {dict(turns)}; wanted {both} ARV and as many SYNC, under a mask up to "
            f"{paths} more"
        )
    return problems
