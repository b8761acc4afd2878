"""What the machine code of every backward kernel of the family must show, checked without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flash_helpers.kernels.ampere.backward.config import WARP_SIZE, DQSum, FlashBackwardKernelConfig
from flash_helpers.kernels.gates import Instruction, MachineCode

# Instructions of the score warps' loop, the mask's among them: an ldmatrix for three products; of a score
# the multiply-add, the exponential, half a conversion and what hides it; copies, waits, addresses and
# additions to dQ. Ordered sums have three ways to go with a value of dQ, one of which rounds and stores it.
PER_PRODUCT, PER_SCORE, OTHERS = 4 / 3, 6, 480
PER_SUM = {DQSum.ATOMIC: 2, DQSum.ORDERED: 28, DQSum.OWN_KERNEL: 0}


# Two sums of 128 registers and what is beside them leave none: a few numbers of the block, read once a tile,
# may lie in local memory. Bytes written and read, all kernels of the pass. Most of the chosen kernels spill
# nothing; the worst, ordered sums of head size 64, had 284 bytes and 9 accesses when this was set.
MAX_SPILL_BYTES, MAX_LOCAL_ACCESSES = 320, 16


def violations(config: FlashBackwardKernelConfig, code: MachineCode) -> list[str]:
    """Everything that a kernel's machine code lacks; empty when it passes.

    Args:
        config: the kernel's configuration.
        code: its machine code. ``code.loop`` is that of the score warps.
    """
    problems = [f"ptxas: {warning}" for warning in code.warnings if "spilled" not in warning]
    if code.spill_bytes > MAX_SPILL_BYTES:
        problems.append(f"{code.spill_bytes} bytes of registers are spilled, more than {MAX_SPILL_BYTES}")
    if not code.loop:
        return [*problems, "no loop holds the products of exactly one tile"]
    if (local := sum(i.name in ("LDL", "STL") for i in code.loop)) > MAX_LOCAL_ACCESSES:
        problems.append(
            f"score warps' loop: {local} accesses to local memory, more than {MAX_LOCAL_ACCESSES}"
        )
    return problems + _loop_violations(config, code.loop) + _sum_violations(config, code.body)


def _loop_violations(config: FlashBackwardKernelConfig, loop: Sequence[Instruction]) -> list[str]:
    names = Counter(i.name for i in loop)
    problems = []
    scores = config.keys_per_warp * config.B_r // config.warps_per_group // WARP_SIZE
    if names["MUFU"] < scores:
        problems.append(
            f"score warps' loop: {names['MUFU']} exponentials; each of its {scores} scores has one"
        )
    if not names["LDGSTS"]:
        problems.append(
            "score warps' loop: no cp.async; the next dO must be under way while this one is used"
        )
    sums = config.B_r * config.d_head // config.dq_tile_warps // WARP_SIZE
    allowed = round(PER_PRODUCT * config.products_per_block + PER_SCORE * scores + OTHERS)
    allowed += PER_SUM[config.dq_sum] * sums
    if (found := sum(names.values()) - names["NOP"]) > allowed:
        problems.append(f"score warps' loop: {found} instructions; its products and scores take {allowed}")
    return problems


def _sum_violations(config: FlashBackwardKernelConfig, body: Sequence[Instruction]) -> list[str]:
    adds = [i for i in body if i.name in ("RED", "REDG")]
    if config.has_dq_kernel:
        return [f"{len(adds)} reductions to global memory; dQ has a kernel of its own"] if adds else []
    least = 1 + (config.dq_sum == DQSum.ORDERED)
    if len(adds) < least:
        return ["no reduction to global memory: nothing adds to the sums of dQ"]
    return []
